"""What is here: MPI and its mpiexec, launchers, allocations, torch, GPU support. Imports neither mpi4py nor torch."""

"""What is here: the launcher, the MPI and its mpiexec, torch, GPU support. Imports neither mpi4py nor torch."""

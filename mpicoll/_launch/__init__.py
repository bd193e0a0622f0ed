"""Starting ranks: the command line, the plan, mpiexec's words, and what runs in each rank. Imports neither mpi4py nor torch."""

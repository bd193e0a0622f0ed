"""Starting ranks: which MPI and mpiexec there are, the command line, the ranks' environment. Imports neither mpi4py nor torch."""

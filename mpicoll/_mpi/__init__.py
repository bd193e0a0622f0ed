"""The only room that imports mpi4py: starting MPI, its datatypes, its communicators, its errors."""

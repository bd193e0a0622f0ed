"""The only package that imports mpi4py. It starts MPI and wraps MPI's datatypes, communicators and errors."""

"""The algorithms of the operations, on addresses, counts and MPI types. Other rooms choose between the algorithms."""

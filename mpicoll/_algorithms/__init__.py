"""How bytes move and are reduced, on addresses, counts and MPI types. Other rooms choose between the algorithms."""

"""How bytes move and are reduced, on addresses, counts and MPI types. Other packages choose between the algorithms."""

"""The algorithms that move and reduce bytes, on addresses, counts and MPI types. Other packages choose between them."""

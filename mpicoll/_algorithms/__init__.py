"""How an operation is carried out, given addresses, counts and MPI's types; no choice between algorithms is made here."""

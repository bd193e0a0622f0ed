"""Tensors over one MPI communicator: what is allowed, how a tensor becomes memory, in which order things run, how they end."""

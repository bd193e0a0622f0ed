"""torch.distributed.nn.api over MPI: remote_module."""

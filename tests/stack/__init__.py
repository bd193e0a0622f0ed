"""What stands on torch.distributed, over MPI."""

"""What stands on torch.distributed, over MPI: each test names a line of the README's table (see tests/stack/record.py)."""

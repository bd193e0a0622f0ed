"""What stands on torch.distributed, over MPI: each test names a line of docs/stack.md (see tests/stack/record.py)."""

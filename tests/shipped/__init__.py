"""The tests that PyTorch ships in its wheel (torch.testing._internal.distributed), run over mpicoll.

    python -m tests.shipped                             all suites, each on its numbers of ranks, one job after the other
    python -m tests.shipped DistributedTest -n 3        one suite, on three ranks
    python -m mpicoll.run -n 4 -m pytest tests/shipped --shipped -k test_all_reduce_sum

PyTorch starts a process per rank and test. Here MPI starts the ranks, and each runs all tests, one after the other. What torch
skips without GPUs or for the backend "mpi" is skipped with torch's reason; left_out.py has the others, with reasons.
"""

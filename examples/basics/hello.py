# python -m mpicoll.run -n 4 examples/basics/hello.py
"""Every rank says who it is."""

import mpicoll as dist

dist.init_process_group()  # rank and world size come from MPI
print(f"Hello from rank {dist.get_rank()} of {dist.get_world_size()}")
dist.destroy_process_group()

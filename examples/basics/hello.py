# python -m mpicoll.run -n 4 examples/basics/hello.py
"""Every rank says who it is.

Output (the lines come in any order):

    Hello from rank 0 of 4
    Hello from rank 1 of 4
    Hello from rank 2 of 4
    Hello from rank 3 of 4
"""

import mpicoll as dist

dist.init_process_group()  # rank and world size come from MPI
print(f"Hello from rank {dist.get_rank()} of {dist.get_world_size()}")
dist.destroy_process_group()

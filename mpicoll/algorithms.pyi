"""For type checkers: `mpicoll.algorithms` is torch.distributed.algorithms."""

from torch.distributed.algorithms import *

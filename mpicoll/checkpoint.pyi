"""For type checkers: `mpicoll.checkpoint` is torch.distributed.checkpoint."""

from torch.distributed.checkpoint import *

"""For type checkers: `mpicoll.tensor` is torch.distributed.tensor."""

from torch.distributed.tensor import *

"""For type checkers: `mpicoll.pipelining` is torch.distributed.pipelining."""

from torch.distributed.pipelining import *

"""For type checkers: `mpicoll.fsdp` is torch.distributed.fsdp."""

from torch.distributed.fsdp import *

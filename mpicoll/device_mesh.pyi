"""For type checkers: `mpicoll.device_mesh` is torch.distributed.device_mesh."""

from torch.distributed.device_mesh import *

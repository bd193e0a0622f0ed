"""``refusals.py [CASE DOOR]``: one of two ranks refuses a collective and catches the error; the other one calls it.

Without arguments all cases at both doors.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

import mpicoll

Call = Callable[[Any], Any]
mpicoll.init_process_group()
rank = mpicoll.get_rank()
tensor = torch.ones(2)


def halves() -> list[torch.Tensor]:
    return [torch.ones(2), torch.ones(2)]


# The call of rank 0, which refuses it, and of rank 1.
CASES: dict[str, tuple[Call, Call]] = {
    "group": (lambda d: d.all_reduce(tensor, group="x"), lambda d: d.all_reduce(tensor)),
    "source": (lambda d: d.broadcast(tensor, 7), lambda d: d.broadcast(tensor, 0)),
    "no tensor": (lambda d: d.all_reduce([1.0]), lambda d: d.all_reduce(tensor)),
    "length": (lambda d: d.scatter(tensor, [*halves(), tensor], 0), lambda d: d.scatter(tensor, None, 0)),
    "no list": (lambda d: d.scatter(tensor, None, 0), lambda d: d.scatter(tensor, None, 0)),
    "size": (lambda d: d.scatter(tensor, [torch.ones(3), tensor], 0), lambda d: d.scatter(tensor, None, 0)),
    "dtype": (lambda d: d.scatter(tensor, [tensor.double(), tensor], 0), lambda d: d.scatter(tensor, None, 0)),
    "no objects": (lambda d: d.scatter_object_list([None], None, 0), lambda d: d.scatter_object_list([None], None, 0)),
    "objects": (lambda d: d.scatter_object_list([None], [1, 2, 3], 0), lambda d: d.scatter_object_list([None], None, 0)),
    "no output": (lambda d: d.scatter_object_list([], [1, 2], 0), lambda d: d.scatter_object_list([None], None, 0)),
}

DOORS: dict[str, Any] = {"mpicoll": mpicoll, "torch": torch.distributed}

for case in sys.argv[1:2] or CASES:
    for door in [DOORS[name] for name in sys.argv[2:] or DOORS]:
        try:
            CASES[case][rank](door)
            error: Exception | None = None
        except Exception as raised:  # noqa: BLE001  printed
            error = raised
        print(
            f"{door.__name__}, {case}: rank {rank} got {type(error).__name__}: {' '.join(str(error).split())}\n",
            end="",
            flush=True,
        )
        tensor.fill_(rank)
        mpicoll.broadcast(tensor, 0)  # must not meet what rank 1 is in
        print(f"{door.__name__}, {case}: rank {rank} survived with {tensor.tolist()}\n", end="", flush=True)
mpicoll.destroy_process_group()

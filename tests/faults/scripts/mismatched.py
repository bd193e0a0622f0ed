"""``mismatched.py DOOR SIZE FOLDER INDEX...``: the last rank makes the second call of a pair, the others make the first one.

The ranks write to FOLDER how each pair (of mismatches.py) has ended. After a pair that does not raise CollectiveMismatch on all
ranks the job ends: by itself, or here when the ranks have gone on for a while.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import mpicoll
from tests.faults.mismatches import pairs

GOES_ON_S = 3.0  # time for the ledger, which looks once a second
LIMIT_S = 6.0

DOOR, SIZE, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
api: Any = mpicoll if DOOR == "mpicoll" else torch.distributed
mpicoll.init_process_group()
RANK, RANKS = mpicoll.get_rank(), mpicoll.get_world_size()


def write(index: int, what: str) -> None:
    hidden = FOLDER / f".{index}-{RANK}"
    hidden.write_text(what)
    hidden.rename(FOLDER / f"{index}-{RANK}")


def written(index: int) -> list[str]:
    return [path.read_text() for path in FOLDER.glob(f"{index}-*")]


def everyone(index: int) -> list[str]:
    """What the ranks have written, when all of them have. The watchdog ends the job if a rank waits for ever."""
    while "begun" in (found := written(index)) or len(found) < RANKS:
        time.sleep(0.005)
    return found


for index in map(int, sys.argv[4:]):
    usual, other = pairs(large=SIZE == "large")[index]
    group: Any = mpicoll.new_group(timeout=timedelta(seconds=LIMIT_S))
    if SIZE == "large":
        mpicoll.all_reduce(torch.zeros(1 << 22), group=group)  # makes the window, through which barriers go, too
    write(index, "begun")
    mpicoll.barrier()
    try:
        (other if RANK == RANKS - 1 else usual).make(api, group, RANK, RANKS, async_op=False)
    except Exception as error:  # noqa: BLE001
        write(index, f"raised {type(error).__name__}")
    else:
        write(index, "returned")
    if any(what != "raised CollectiveMismatch" for what in everyone(index)):
        time.sleep(GOES_ON_S)
        write(index, f"{(FOLDER / f'{index}-{RANK}').read_text()}, went on")
        time.sleep(0.5)
        os._exit(9)
    mpicoll.destroy_process_group(group)

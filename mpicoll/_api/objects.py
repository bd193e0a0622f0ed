"""Objects travel pickled: unpickling runs code that the sender chose, so every rank must trust every other.

torch's own object functions work on our groups; only receiving from anybody, which torch documents and refuses, is ours.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as torchs
from torch.distributed import ProcessGroup

from mpicoll._api import groups
from mpicoll._c10d import dynamo


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    **more: Any,
) -> int:
    """Receives as many objects as ``object_list`` has places, into them; returns the sender's global rank.

    Args:   src: global rank; None, without group_src: from anybody.
    """
    communicator = groups.of(group)
    if communicator is None or src is not None or group_src is not None or more.get("weights_only"):
        return torchs.recv_object_list(object_list, src, group, device, group_src, use_batch, **more)  # type: ignore[no-any-return]
    sizes = torch.empty(len(object_list), dtype=torch.int64, device="cpu")
    sender = communicator.recv(sizes, None)
    content = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
    communicator.recv(content, sender)
    for index, part in enumerate(content.split(sizes.tolist())):
        object_list[index] = pickle.Unpickler(io.BytesIO(part.numpy().tobytes())).load()
    return communicator.global_ranks[sender]


dynamo.skip_frames(__name__)

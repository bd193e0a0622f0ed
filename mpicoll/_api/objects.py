"""Objects travel pickled. Unpickling runs code that the sender chose, so every rank must trust every other.

torch's own functions for objects work on our groups. The one here is that which torch documents and refuses: receiving from any
rank.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as torch_dist
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
    """Receives a list of objects from one rank, which must call ``send_object_list`` (not collective).

    Returns when the objects are here. Unlike torch's, it can receive from any rank. Objects are pickled: unpickling runs
    code that the sender chose, so every rank must trust every other.

    Args:
        object_list: Overwritten. As long as the sender's.
        src: Global rank. If neither this nor ``group_src`` is given: any rank.
        group: None means the default group.
        device: As in torch; without effect if the sender is any rank.
        group_src: Rank within the group.
        use_batch: As in torch; without effect if the sender is any rank.
        more: Arguments that only some versions of torch have, such as ``weights_only``; passed on.

    Returns:
        The sender's global rank; -1 on a rank outside the group.

    Raises:
        ValueError: Both of ``src`` and ``group_src`` are given, or the group has no such rank.
        OperationTimeout: Nothing came in time.

    Example:
        >>> objects = [{"loss": 0.5}] if dist.get_rank() == 0 else [None]
        >>> if dist.get_rank() == 0:
        ...     dist.send_object_list(objects, dst=1)
        ... else:
        ...     sender = dist.recv_object_list(objects)
        >>> objects
        [{'loss': 0.5}]
    """
    communicator = groups.of(group)
    if communicator is None or src is not None or group_src is not None or more.get("weights_only"):
        return torch_dist.recv_object_list(object_list, src, group, device, group_src, use_batch, **more)  # type: ignore[no-any-return]
    sizes = torch.empty(len(object_list), dtype=torch.int64, device="cpu")
    sender = communicator.recv(sizes, None)
    content = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
    communicator.recv(content, sender)
    for index, part in enumerate(content.split(sizes.tolist())):
        object_list[index] = pickle.Unpickler(io.BytesIO(part.numpy().tobytes())).load()
    return communicator.global_ranks[sender]


dynamo.skip_frames(__name__)

"""Which device of a worker's becomes which device of another's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

DeviceMap: TypeAlias = "dict[torch.device, torch.device]"


class DeviceMaps:
    """Of one worker, ``me``.

    A call goes by the caller's map. What answers it goes by the same map the other way round, as torch has it, so that a caller
    alone can say what belongs together; gradients go by either.

    Args:   everybody: each worker's maps, by its name, by the name of the worker that they are for.
    Raises: ValueError, on all workers alike: a map is for a worker that there is not.
    """

    def __init__(self, me: str, everybody: Mapping[str, Mapping[str, DeviceMap]]) -> None:
        for name, maps in everybody.items():
            if unknown := sorted(set(maps) - set(everybody)):
                workers = ", ".join(map(repr, everybody))
                raise ValueError(
                    f"Node {name} has invalid target node names in its device maps: {unknown[0]!r}; the workers are {workers}"
                )
        mine = everybody[me]
        theirs = {name: _turned(maps.get(me, {})) for name, maps in everybody.items()}
        self._calls = {name: {**theirs[name], **mine.get(name, {})} for name in everybody}
        self._answers = {name: {**mine.get(name, {}), **theirs[name]} for name in everybody}

    def to(self, name: str, answer: bool) -> DeviceMap:
        """For what goes to a worker."""
        return (self._answers if answer else self._calls)[name]


def _turned(device_map: DeviceMap) -> DeviceMap:
    return {there: here for here, there in device_map.items()}

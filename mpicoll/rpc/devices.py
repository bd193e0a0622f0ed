"""Device maps: which device of one worker a CUDA tensor reaches from a device of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

DeviceMap: TypeAlias = "dict[torch.device, torch.device]"


class DeviceMaps:
    """The device maps of one worker, ``me``.

    As in torch, the arguments of a call use the map of the caller, and the answer uses the same map backwards: the caller alone
    decides which devices belong together. Gradients use either.

    Args:
        all_maps: Each worker's maps: by its name, then by the name of the receiver.

    Raises:
        ValueError: On all workers alike: a map names a worker that does not exist.
    """

    def __init__(self, me: str, all_maps: Mapping[str, Mapping[str, DeviceMap]]) -> None:
        for name, maps in all_maps.items():
            if unknown := sorted(set(maps) - set(all_maps)):
                workers = ", ".join(map(repr, all_maps))
                raise ValueError(
                    f"Node {name} has invalid target node names in its device maps: {unknown[0]!r}; the workers are {workers}"
                )
        forward = all_maps[me]
        backward = {name: _inverse(maps.get(me, {})) for name, maps in all_maps.items()}
        self._calls = {name: {**backward[name], **forward.get(name, {})} for name in all_maps}
        self._answers = {name: {**forward.get(name, {}), **backward[name]} for name in all_maps}

    def to(self, name: str, answer: bool) -> DeviceMap:
        """Returns the map for a message to the worker of this name."""
        return (self._answers if answer else self._calls)[name]


def _inverse(device_map: DeviceMap) -> DeviceMap:
    return {target: source for source, target in device_map.items()}

"""Code for torch <= 2.13 alone. When the oldest torch is 2.14: delete the folder, and what BACKEND_SUBCLASSES guards.

process_group: the adapter, a ProcessGroup. Later versions take one, too, but without hooks, new_window and several backends.
mixed: the adapter for a group with several backends, which later versions build themselves.
functional_ops: two ops of compiled graphs whose C++ cannot work with such an adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpicoll._c10d.names import OURS
from mpicoll._c10d.torch213 import functional_ops
from mpicoll._c10d.torch213.mixed import MixedProcessGroup, parts
from mpicoll._c10d.torch213.process_group import MpiProcessGroup

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

_mixture: dict[str, str] | None = None  # backend by kind of device, while torch makes a mixed group


def adapt(communicator: Communicator, on_close: Callable[[Communicator], None], options: Any) -> MpiProcessGroup:
    """Makes the adapter over a communicator, from torch's DistributedBackendOptions."""
    if _mixture is not None:
        return MixedProcessGroup(communicator, on_close, _mixture, options)
    functional_ops.register()
    return MpiProcessGroup(communicator, on_close)


@contextlib.contextmanager
def mixing(translated: str) -> Iterator[str]:
    """Yields the backend string for torch: our plugin alone in place of a mixture, which `adapt` then makes."""
    global _mixture
    _mixture = parts(translated)
    try:
        yield translated if _mixture is None else OURS
    finally:
        _mixture = None

"""The pre and post hooks of a group (torch >= 2.14), which torch's C++ calls around every operation that passes through it.

mpicoll's functions go straight to the engine, but through torch for a group with hooks, so that these see their calls, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

from mpicoll._c10d import dynamo, patches
from mpicoll._c10d.torch_world import has

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

# The communicator of each open group without hooks, entered when a function of mpicoll uses it.
found: dict[ProcessGroup, Communicator] = {}
hooked: dict[ProcessGroup, set[tuple[str, int]]] = {}  # the hooks of each group that has any: kind and number


def forget(communicator: Communicator) -> None:
    """Called when a group is destroyed."""
    for group in [group for group, known in found.items() if known is communicator]:
        del found[group]


def watch() -> None:
    """Wraps the methods that register hooks, once. A torch without them is left alone."""
    for kind in ("pre", "post"):
        patches.wrap(f"{patches.GROUP}.register_{kind}_hook", functools.partial(_noting, kind, set.add))
        patches.wrap(f"{patches.GROUP}.unregister_{kind}_hook", functools.partial(_noting, kind, set.discard))


def _noting(kind: str, change: Callable[[set[Any], Any], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: ProcessGroup, hook_id: int, *args: Any, **kwargs: Any) -> None:
        method(self, hook_id, *args, **kwargs)
        change(hooked.setdefault(self, set()), (kind, hook_id))
        for group in [group for group, hooks in hooked.items() if not hooks or not has(group)]:  # none left, or destroyed
            del hooked[group]
        if self in hooked:
            found.pop(self, None)

    dynamo.disable(wrapped)
    return wrapped

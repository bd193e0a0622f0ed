"""What is undone when torch's init_process_group or new_group raises, so that a second try works."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpicoll._c10d import adapters, torch_world


@contextlib.contextmanager
def undone_on_failure() -> Iterator[None]:
    """If the body raises: closes the communicators that it made, and removes its groups from torch's tables."""
    world = torch_world.world
    fresh, group_count = world.default_pg is None, world.group_count
    before = set(adapters.alive)
    try:
        yield
    except BaseException:
        made = [communicator for communicator in adapters.alive if communicator not in before]
        for communicator in made:
            del adapters.alive[communicator]
            communicator.close()
        torch_world.forget({communicator.name for communicator in made}, group_count)
        if fresh:
            torch_world.forget_world()
        raise

"""The end of a context, on every worker that knows of it."""

from __future__ import annotations

import contextlib

from mpicoll.autograd import contexts, passes


def release(context_id: int) -> None:
    """Forgets it here, and has the workers that know of it through this one do the same."""
    found = contexts.forget(context_id)
    if found is None or passes.call is None:
        return
    for worker in found.workers - {contexts.worker_id}:
        with contexts.entered(None), contextlib.suppress(RuntimeError):  # who has left has forgotten it, too
            passes.call(worker, release, (context_id,))

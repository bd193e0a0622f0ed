"""Ends a distributed autograd context on every worker that knows it."""

from __future__ import annotations

import contextlib

from mpicoll.autograd import contexts


def release(context_id: int) -> None:
    """Forgets the context on this worker, and on the workers that learned of it from this one."""
    registry = contexts.registry
    context = registry.forget(context_id)
    if context is None or not registry.is_connected:
        return
    for worker in context.workers - {registry.worker_id}:
        with contextlib.suppress(RuntimeError):  # a worker that has left has forgotten it
            registry.call(worker, release, context_id)

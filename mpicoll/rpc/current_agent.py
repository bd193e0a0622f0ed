"""The agent of this process: set by init_rpc, cleared by shutdown. All state of RPC belongs to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicoll.rpc.agent import Agent  # not at run time: it imports MPI, which starts it

_agent: Agent | None = None


def set_to(agent: Agent | None) -> None:
    """Makes this agent the current one. None: RPC has ended."""
    global _agent
    _agent = agent


def find() -> Agent | None:
    """Returns the current agent. None: before init_rpc, or after shutdown."""
    return _agent


def get() -> Agent:
    """Returns the current agent. Raises RuntimeError if there is none."""
    if _agent is None:
        raise RuntimeError("RPC has not been initialized. Call mpicoll.rpc.init_rpc first.")
    return _agent


def get_for_rref() -> Agent:
    """Like `get`, with the words that torch uses for references."""
    if _agent is None:
        raise RuntimeError("Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?")
    return _agent

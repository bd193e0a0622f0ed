"""The three ways to ask another worker, as one: rpc_sync, rpc_async and remote, and the proxies of an RRef of these names."""

from __future__ import annotations

from typing import Any

import torch

from mpicoll.rpc.rref import RRef

HOWS = ("rpc_sync", "rpc_async", "remote")


def asked(call: Any, *arguments: Any, in_time: bool = False) -> Any:
    """Calls one of rpc's functions, or a method by a proxy; returns the answer itself, however it comes.

    in_time: waits for the creation of an RRef first, which has the time limit of the call; to_here has another one.
    """
    answer = call(*arguments)
    if isinstance(answer, RRef):
        if in_time:
            answer._get_future().wait()
        return answer.to_here()
    return answer.wait() if isinstance(answer, torch._C.Future) else answer

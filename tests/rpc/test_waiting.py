"""A call that is not answered names the function, the worker, its host, the time, and the state of its process."""

from __future__ import annotations

import re

import pytest

from tests.support import launch

pytestmark = [pytest.mark.launch, pytest.mark.timeout(90)]
SCRIPT = "tests/rpc/scripts/waiting.py"
CALLS = {
    "rpc_sync": "nap",
    "rpc_async": "nap",
    "remote": "RRef.to_here",
    "creation": "nap",
    "method": "nap of an RRef",
    "remote method": "nap of an RRef",
}


@pytest.mark.parametrize(("how", "state"), [("busy", "runs"), ("stopped", r"is stopped \(SIGSTOP\)")])
def test_a_call_that_expires(how: str, state: str) -> None:
    done = launch(2, SCRIPT, how, timeout_s=60)
    for call, function in CALLS.items():
        prefix = r"CallTimedOut: RPC ran for more than set timeout \(500 ms\) and will now be marked with an error: "
        said = rf"{function} on worker 'slow' \(rank 1\): no answer within 0.5 s; its process \d+ on host \S+ {state}"
        assert re.search(rf"^{call}: {prefix}{said}$", done.stdout, re.MULTILINE), f"{call}: {done.stdout}{done.stderr}"
    if how == "stopped":
        missing = (
            rf"not every worker has come to its shutdown within 0.5 s: 'slow' \(rank 1\), its process \d+ on host \S+ {state}"
        )
        assert re.search(missing, done.stdout), done.stdout
    else:
        assert done.returncode == 0, done.stderr

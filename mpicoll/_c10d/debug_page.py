"""A page of torch's debug server (`torch.distributed.debug`, torch >= 2.13): what mpicoll knows of all ranks, in a browser.

    browser ──► `Page`, in a child process of rank 0 ──► torch's server in each rank ──► `answer`: its flight record

The page says what `mpicoll doctor dump` says of files.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from typing import Any

from torch._C._distributed_c10d import TCPStore, _register_handler
from torch.distributed import DistNetworkError
from torch.distributed.debug import _handlers
from torch.distributed.debug._frontend import DebugHandler, NavLink, Response, Route, fetch_all

from mpicoll._base import probe
from mpicoll._faults.flight_recorder import recorder
from mpicoll._launch.doctor import dump
from mpicoll._launch.doctor.report import Finding
from mpicoll._mpi import runtime

NAME = "mpicoll"  # of the page, and of what the servers are asked for


class Page(DebugHandler):
    """Compares the flight records of all ranks, as `mpicoll doctor dump` does, and shows each."""

    def routes(self) -> list[Route]:
        return [Route(f"/{NAME}", self._show)]

    def nav_links(self) -> list[NavLink]:
        return [NavLink(f"/{NAME}", NAME)]

    def dump(self) -> str:
        return compare(fetch_all(NAME, timeout=self.fetch_timeout)[1])

    def dump_filename(self) -> str:
        return NAME

    def _show(self, request: Any) -> bytes:
        addresses, answers = fetch_all(NAME, timeout=self.fetch_timeout)
        shown = [Response(200, compare(answers)), *answers]
        page: bytes = request.frontend.render_template(
            "raw_resp.html", title=NAME, addrs=["all ranks, compared", *addresses], resps=shown
        )
        return page


def compare(answers: list[Response]) -> str:
    """The report of `mpicoll doctor dump` on the ranks' answers, by rank. One that is no record is a finding."""
    records, unreadable = {}, []
    for rank, answer in enumerate(answers):
        try:
            records[rank] = dump.parse(rank, answer.json())
        except (ValueError, KeyError, TypeError) as error:
            unreadable.append(Finding("fail", "records", f"rank {rank} gave none: {answer.text or error}"))
    return dump.examine(records, unreadable).as_text("the ranks agree", "wrong")


def answer(_: Any, response: Any) -> None:
    """Answers the frontend with this rank's record and its MPI. Runs in a thread of the rank's server."""
    response.set_content(json.dumps({"mpi": probe.loaded(), **recorder.record("the debug server")}, indent=1), "application/json")
    response.set_status(200)


@functools.cache
def serve() -> TCPStore | None:
    """Lets the server of this rank answer for mpicoll. Opens, on rank 0, the store at MASTER_PORT where the servers meet.

    A program may have opened one there itself; then none is opened.
    """
    _register_handler(NAME, answer)
    # C++ drops the handlers, also torch's, after the end of Python, where a function that nobody else refers to cannot be freed.
    for handler in (answer, *filter(callable, vars(_handlers).values())):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
    mpi = runtime.current()
    with contextlib.suppress(DistNetworkError):
        if mpi is not None and mpi.rank == 0:
            return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, True, wait_for_workers=False)
    return None

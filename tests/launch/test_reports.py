"""Who may report to the supervisor, and which report is the first cause."""

import contextlib
import json
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mpicoll._launch.output import Fatal
from mpicoll._launch.reports import Reports
from tests.support import ROOT

SECRET = "5ec2e7"


@pytest.fixture
def reports() -> Iterator[Reports]:
    with selectors.DefaultSelector() as selector:
        server = Reports(selector, "127.0.0.1", SECRET)
        yield server
        server.close()


def say(reports: Reports, text: str, close: bool = False) -> socket.socket:
    """Sends ``text`` on a new connection, and lets the server read it."""
    stream = socket.create_connection(("127.0.0.1", reports.port), 5)
    stream.sendall(text.encode())
    if close:
        stream.close()
    while ready := reports._selector.select(0.1):
        for key, _ in ready:
            key.data()
    return stream


def begin(rank: int, size: int) -> str:
    return f"{SECRET} " + json.dumps({"number": rank, "size": size, "pid": 77, "host": "h"}) + "\n"


def ended(at: int, status: int) -> str:
    return json.dumps({"ended_at": at, "status": status}) + "\n"


def why(at: int, status: int, text: str, traceback: bool = False) -> str:
    return json.dumps({"why": text, "why_at": at, "why_status": status, "traceback": traceback}) + "\n"


def was(text: str) -> str:
    return json.dumps({"was": f"0.5 s before, {text}"}) + "\n"


@pytest.mark.parametrize("line", ["wrong {}", "begin", '{"why": "text"}', "GET / HTTP/1.1", "x" * 20000, "[" * 10000])
def test_who_does_not_know_the_secret_is_dropped(line: str, reports: Reports) -> None:
    with say(reports, line + "\n") as stream:
        stream.settimeout(5)
        assert stream.recv(1) == b""
    assert reports.ranks == {}
    assert not reports.connected()


def test_the_first_cause_is_the_earliest_and_not_what_it_led_to(reports: Reports) -> None:
    say(reports, begin(0, 3) + why(30, 1, "RuntimeError: peer lost") + ended(40, 1), close=True)
    say(reports, begin(1, 3) + ended(20, -11), close=True)
    say(reports, begin(2, 3), close=True)  # killed with its monitor
    first = reports.first_cause()
    assert first is not None
    assert (first.number, first.how(), first.exit_status()) == (1, "killed by SIGSEGV", 139)
    assert reports.ranks[2].lost
    assert reports.failed()


def test_a_rank_that_was_killed_while_memory_was_short(reports: Reports) -> None:
    """The kernel tells by a counter that it has killed a process, and by its log, which few may read, which one."""
    say(reports, begin(0, 1) + was("it slept") + '{"oom": true}\n' + ended(20, -9), close=True)
    assert reports.ranks[0].how() == "killed by SIGKILL (out of memory?); 0.5 s before, it slept"


@pytest.mark.parametrize(
    ("neighbour", "other", "cause"),
    [
        (ended(20, 14), ended(30, -9), 1),  # the neighbour lost its connection to rank 1
        (ended(20, 14), ended(30, -15), 0),  # it ended by itself, and the launcher ended rank 1
        (ended(20, 14), ended(1000000020, -9), 0),  # likewise, after the launcher's patience
        (ended(20, 13), ended(30, -9), 0),
        (why(20, 14, "SystemExit: 14") + ended(20, 14), ended(30, -9), 0),
    ],
)
def test_a_killed_rank_is_the_cause_and_not_a_neighbour_that_lost_its_connection(
    neighbour: str, other: str, cause: int, reports: Reports
) -> None:
    for rank, lines in enumerate((neighbour, other)):
        say(reports, begin(rank, 2) + lines, close=True)
    first = reports.first_cause()
    assert first is not None
    assert first.number == cause


def test_the_rank_in_which_mpich_ends_the_job_is_the_cause(reports: Reports) -> None:
    """The other rank has the same status, and its monitor reports first. What a rank says itself counts more."""
    for rank, at in ((0, 20), (1, 30)):
        say(reports, begin(rank, 2) + was("it was in its collective 7") + ended(at, 142), close=True)
    first = reports.first_cause(Fatal(1, "Fatal error in internal_Recv", 142))
    assert first is reports.ranks[1]
    assert first.how() == "Fatal error in internal_Recv; 0.5 s before, it was in its collective 7"
    assert first.exit_status() == 142
    for told in (why(10, 1, "ValueError: x") + ended(20, 1), ended(20, -9)):  # it has said why; it was killed, and rank 1 lost it
        say(reports, begin(0, 2) + told, close=True)
        assert reports.first_cause(Fatal(1, "Fatal error in internal_Recv", 142)) is reports.ranks[0]


@pytest.mark.parametrize("traceback", [True, False])
def test_of_ranks_that_fail_alike_one_prints_its_traceback(traceback: bool, reports: Reports) -> None:
    """Their reasons may differ in numbers. A later reason of the same rank does not count. sys.exit(3) prints no traceback."""
    texts = ("ValueError: rank 0 of 3", "ValueError: rank 1 of 3", "ValueError: other")
    streams = [say(reports, begin(rank, 3) + why(rank, 1, text, traceback)) for rank, text in enumerate(texts)]
    streams[1].sendall(why(9, 1, "uncaught ValueError").encode())
    while ready := reports._selector.select(0.1):
        for key, _ in ready:
            key.data()
    answer = b"known\n" if traceback else b"new\n"
    assert [stream.recv(100) for stream in streams] == [b"new\n", 2 * answer, b"new\n"]
    assert reports.alike == [1] * traceback
    assert [rank.why for rank in reports.ranks.values()] == list(texts)


@pytest.mark.launch
@pytest.mark.parametrize(("hard", "known"), [(4000, "40"), (30, "some")])
def test_more_ranks_than_files_may_be_open(hard: int, known: str) -> None:
    """The soft limit is raised. At the hard one, those that have connected are watched, and the loop does not spin."""
    command = [sys.executable, str(ROOT / "tests/launch/scripts/few_files.py"), "30", str(hard), "40"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    with contextlib.ExitStack() as opened:
        streams = [opened.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(40)]
        for rank, stream in enumerate(streams):
            stream.sendall(begin(rank, 40).encode())
        streams[5 if known == "some" else 39].sendall(why(1, 1, "RuntimeError: failed").encode())
        said, complaint = server.communicate(timeout=30)
    count, failed, rests = said.split()
    assert (failed, rests) == ("True", "True")
    if known == "some":
        assert 5 < int(count) < 30
        assert f"it watches {count} ranks, and mpiexec alone the others" in complaint
    else:
        assert (count, complaint) == (known, "")


def test_an_early_exit_with_status_0_is_no_failure_by_itself(reports: Reports) -> None:
    say(reports, begin(0, 1) + ended(20, 0), close=True)
    assert reports.all_ended()
    assert not reports.failed()
    first = reports.first_cause()
    assert first is not None
    assert "os._exit" in first.how()

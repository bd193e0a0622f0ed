"""The memory in which a rank leaves what it was doing last."""

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from mpicoll._base import last_words
from mpicoll._base.group_errors import OperationTimeout
from mpicoll._base.last_words import MOST, NBYTES, Memory
from mpicoll._faults import under_way
from mpicoll._faults.under_way import Table


def text(memory: Memory) -> str | None:
    written = memory.read()
    return None if written is None else written[1]


def test_a_text_that_is_too_long_is_cut() -> None:
    memory = Memory()
    memory.write("x" * (MOST + 1))
    memory.write("\N{SNOWMAN}" * MOST)
    assert len((text(memory) or "").encode()) <= MOST + 2  # the end of a snowman
    memory.write("y" * (MOST + 1))
    assert text(memory) == "y" * MOST


@pytest.mark.parametrize("done", range(0, 40, 3))
def test_a_writer_that_is_killed_leaves_the_text_before(done: int) -> None:
    """``done``: bytes of the third write that have reached the memory."""
    memory = Memory()
    memory.write("the first text")
    memory.write("the second text")
    before = memory._memory[:]
    memory.write("the third text")
    after = memory._memory[:]
    first = next(place for place in range(NBYTES) if before[place] != after[place])
    memory._memory[:] = after[: first + done] + before[first + done :]
    assert text(memory) == ("the third text" if memory._memory[:] == after else "the second text")


def test_what_a_program_writes_outlives_it_and_its_children_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words, "_monitor", None)
    memory = Memory()
    pid = os.fork()
    if pid == 0:
        last_words.doing("nobody reads this")
        last_words.use(*os.pipe(), 0, memory)
        last_words.doing("of the rank")
        if os.fork() == 0:
            last_words.doing("of its child")
            os._exit(0)
        os.wait()
        os._exit(0)
    os.waitpid(pid, 0)
    assert text(memory) == "of the rank"


WORKER = """Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)

    ~~~~^^^
KeyError: 'sample 5 has no label'
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", ""),
        ("ValueError: one\ntwo", "ValueError: one"),
        (f"KeyError: {WORKER}", "KeyError: 'sample 5 has no label'"),
        (f"Exception: \n\n-- Process 1 ended:\n{WORKER}and two\n", "KeyError: 'sample 5 has no label'"),
        ("ValueError: no Traceback (most recent call last):", "ValueError: no Traceback (most recent call last):"),
    ],
)
def test_the_line_of_an_error_that_says_what_happened(text: str, cause: str) -> None:
    """The message of an error from another process is a traceback, of which the first line says where it happened."""
    assert last_words.cause(text) == cause


def test_the_rank_that_an_error_is_about() -> None:
    """Whoever words it notes the rank, and an error of torch may quote ours."""
    sentence = last_words.about(13, "Rank 13 has not come: it is in barrier")
    text = f"all_reduce on group '0' (rank 0 of 14): Timed out: no end. {sentence}"
    for error in (OperationTimeout(text), RuntimeError(f"in backward: {text}")):
        said = f"has not come: {type(error).__name__}: {error}"
        assert last_words.of_error(error) == (said, (13, False))
    late = OperationTimeout(f"new_group: {last_words.late([1, 2], 3)}")
    assert last_words.of_error(late)[1] == (1, False)
    other = OperationTimeout("new_group: no end within the timeout of 3 s, although all ranks have come")
    assert last_words.of_error(other) == (f"OperationTimeout: {other}", None)


NOW = 1000.0


def test_what_a_rank_does_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank without a collective, and of one with two messages. For the rest: launch/test_supervisor.py."""
    monkeypatch.setattr(under_way, "time", SimpleNamespace(monotonic=lambda: NOW))
    idle: Any = Mock(name="0", history=[], line=Mock(ended=0), global_ranks=[4, 5, 6], under_way=lambda: None)
    group: Any = Mock(
        history=[(1, "barrier", NOW, (), False)], line=Mock(ended=1), left=0, global_ranks=[4, 5, 6], under_way=lambda: None
    )
    group.name, table = "dp", Table()
    assert table.in_words() == "it had begun no collective on any group"
    table.groups[idle] = None
    assert table.in_words() == "it had begun no collective on any group"
    table.groups[group] = None
    assert table.in_words() == "its last collective on group 'dp' was number 1, barrier(), which had ended"
    table.inside.update({("recv", group, NOW, peer): None for peer in (1, None)})
    assert (
        table.in_words()
        == "it was in recv on group 'dp' with rank 5, for 0 s and it was in recv on group 'dp' with any rank, for 0 s"
    )

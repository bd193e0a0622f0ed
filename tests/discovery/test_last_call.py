"""The memory in which a rank leaves what it was doing last."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from mpicoll._discovery import last_call
from mpicoll._discovery.last_call import MOST, NBYTES, Memory
from mpicoll._progress import current_call


def text(memory: Memory) -> str | None:
    written = memory.read()
    return None if written is None else written.text


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
    monkeypatch.setattr(last_call, "_memory", None)
    monkeypatch.setattr(last_call, "_owner", 0)
    memory = Memory()
    pid = os.fork()
    if pid == 0:
        last_call.write("nobody reads this")
        last_call.use(memory)
        last_call.write("of the rank")
        if os.fork() == 0:
            last_call.write("of its child")
            os._exit(0)
        os.wait()
        os._exit(0)
    os.waitpid(pid, 0)
    assert text(memory) == "of the rank"


NOW = 1000.0


def a_group(name: str, issued: int, ended: int, asynchronous: bool = False, ago_s: float = 0) -> Any:
    """A group of the ranks 4, 5 and 6 that has begun ``issued`` barriers, of which so many have ended."""
    history = [(number, "barrier", NOW - ago_s, (), asynchronous) for number in range(1, issued + 1)]
    return SimpleNamespace(name=name, history=history, ended=ended, global_ranks=[4, 5, 6])


@pytest.mark.parametrize(
    ("groups", "peers", "words"),
    [
        ([], [], "it had begun no collective"),
        ([a_group("0", 0, 0)], [], "it had begun no collective"),
        ([a_group("0", 3, 3)], [], "it was outside of collectives; its last was collective 3 on group '0', barrier()"),
        ([a_group("0", 4, 3)], [], "it was in its collective 4 on group '0', barrier()"),
        ([a_group("0", 4, 3, ago_s=7.2)], [], "it was in its collective 4 on group '0', barrier(), for 7 s"),
        ([a_group("0", 4, 3, True)], [], "its collective 4 on group '0', barrier(), was under way"),
        (
            [a_group("dp", 1, 1)],
            [1, None],
            "it was in recv on group 'dp' with rank 5 and it was in recv on group 'dp' with any rank",
        ),
    ],
)
def test_what_a_rank_does_in_words(
    groups: list[Any], peers: list[int | None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_call, "time", SimpleNamespace(monotonic=lambda: NOW))
    messages = {thread: ("recv", groups[0], NOW, peer) for thread, peer in enumerate(peers)}
    assert current_call.in_words(messages, lambda: groups) == words

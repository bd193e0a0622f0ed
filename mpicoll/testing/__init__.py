"""Tests of MPI programs with pytest: helpers for tests. The plugin itself makes one pytest run out of N ranks.

pytest loads the plugin `mpicoll.testing._plugin` from the wheel. Neither imports torch or starts MPI, and the plugin changes
nothing in a run of one process. ``mpirun -n 3 python -m pytest`` and ``pytest --ranks 3`` are one run on three ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

__all__ = ["agree", "everyone", "only_on", "raises_everywhere"]

T = TypeVar("T")

sessions: list[Any] = []  # that of this process (`mpicoll.testing._session.Session`), if it is a rank


def agree(condition: object, message: object = "") -> None:
    """Fails the test on all ranks if ``condition`` is false on any, and lists the wrong ones (collective over all ranks).

    Ranks that are at another ``agree`` of the test, or have left it by an exception, count as wrong. It works on one rank, too.

    Args:
        condition: Any value; its truth counts.
        message: What this rank has to say about it. It is shown if this rank is wrong.

    Example:
        >>> from mpicoll.testing import agree
        >>> agree(1 + 1 == 2, "arithmetic has changed")
    """
    __tracebackhide__ = True
    said = everyone((bool(condition), str(message)))
    wrong = [f"  rank {r}: {text}" for r, (right, text) in enumerate(said) if not right]
    if wrong:
        pytest.fail("\n".join([f"wrong on {len(wrong)} of {len(said)} ranks", *wrong]))


def everyone(value: T) -> list[T]:
    """Returns every rank's ``value``, by rank (collective over all ranks).

    The values travel beside the program's own messages, on a communicator of the plugin.

    Args:
        value: Any object that pickles.

    Example:
        >>> from mpicoll.testing import everyone
        >>> len(set(everyone("the same everywhere")))
        1
    """
    __tracebackhide__ = True
    return sessions[0].exchange_in_test(value) if sessions else [value]


def only_on(rank: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls ``function`` on one rank, and returns its result on all ranks (collective over all ranks).

    An exception of the function is raised on all ranks.

    Args:
        rank: The rank that calls it.
        function: What it calls. The result must pickle.
        args: Arguments of the function.
        kwargs: Arguments of the function by name.

    Example:
        >>> from mpicoll.testing import only_on
        >>> only_on(0, sorted, [2, 1])
        [1, 2]
    """
    __tracebackhide__ = True
    result: T | None = None
    error: Exception | None = None
    if not sessions or sessions[0].side.rank == rank:
        try:
            result = function(*args, **kwargs)
        except Exception as raised:  # noqa: BLE001  raised again on all ranks
            error = raised
    answers = everyone((result, error))
    result, error = answers[rank if len(answers) > 1 else 0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


@contextmanager
def raises_everywhere(kind: type[BaseException], match: str = "") -> Iterator[None]:
    """Returns a context whose body must raise ``kind`` on all ranks; otherwise the test fails on all (collective over all ranks).

    It lists the ranks that have raised nothing, or something else.

    Args:
        kind: The exception.
        match: A regular expression that its text must contain.

    Example:
        >>> from mpicoll.testing import raises_everywhere
        >>> with raises_everywhere(ValueError, match="invalid literal"):
        ...     int("one")
    """
    __tracebackhide__ = True
    said = "raised nothing"
    try:
        yield
    except Exception as error:  # noqa: BLE001  another one fails the test
        right = isinstance(error, kind) and re.search(match, str(error))
        said = "" if right else f"{type(error).__name__}: {error}"
    agree(not said, said)

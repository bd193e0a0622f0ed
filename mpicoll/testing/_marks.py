"""Which tests run on how many ranks: marks of mpicoll, and those of pytest-mpi and mpi-pytest where these are not installed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

MARKS = (
    "ranks(*sizes): runs only on one of these numbers of ranks (mpicoll)",
    "min_ranks(n): runs only on n ranks or more (mpicoll)",
)
OF_PYTEST_MPI = (
    "mpi(min_size=None): runs only on min_size ranks or more (mpicoll, as pytest-mpi)",
    "mpi_skip: skipped on several ranks (mpicoll, as pytest-mpi)",
    "mpi_break: skipped on several ranks (mpicoll, as pytest-mpi)",
    "mpi_xfail: expected to fail on several ranks (mpicoll, as pytest-mpi)",
)
OF_MPI_PYTEST = ("parallel(nprocs=3): runs only on this number of ranks, or one of these (mpicoll, as mpi-pytest)",)


def register(config: pytest.Config) -> None:
    for line in (*MARKS, *(() if config.pluginmanager.hasplugin("pytest_mpi") else OF_PYTEST_MPI), *OF_MPI_PYTEST):
        config.addinivalue_line("markers", line)


def choose(config: pytest.Config, items: list[pytest.Item], size: int) -> list[str]:
    """Deselects the tests that do not run on this number of ranks. Returns the reasons, in words."""
    foreign = not config.pluginmanager.hasplugin("pytest_mpi")
    reasons = {item: reason for item in items if (reason := next(_reasons(item, size, foreign), None))}
    if reasons:
        items[:] = [item for item in items if item not in reasons]
        config.hook.pytest_deselected(items=list(reasons))
    if foreign and size > 1:
        for item in items:
            _mark(item)
    counts = Counter(reasons.values())
    return [f"{count} test{'s need' if count > 1 else ' needs'} {reason}" for reason, count in counts.items()]


def _reasons(item: pytest.Item, size: int, foreign: bool) -> Iterator[str]:
    """What the marks of ``item`` need that this number of ranks does not give."""
    for mark in item.iter_markers("ranks"):
        if size not in mark.args:
            yield f"{_either(mark.args)} ranks"
    least = [mark.args[0] for mark in item.iter_markers("min_ranks")]
    if foreign:
        least += [mark.kwargs["min_size"] for mark in item.iter_markers("mpi") if mark.kwargs.get("min_size") is not None]
    mark_ = item.get_closest_marker("parallel")  # the closest one replaces that of the class or module
    sizes = _parallel(mark_, size) if mark_ is not None else ()
    if sizes and size not in sizes:
        yield f"{_either(sizes)} ranks"
    if least and size < max(least):
        yield f"{max(least)} ranks or more"


def _parallel(mark: pytest.Mark, size: int) -> Sequence[int]:
    """The numbers of ranks of a mark of mpi-pytest. On one rank a bare ``parallel`` may be the mark of another plugin."""
    value = mark.kwargs.get("nprocs", mark.args[0] if mark.args else (3 if size > 1 else ()))
    return (value,) if isinstance(value, int) else tuple(each for each in value if isinstance(each, int))


def _either(sizes: Sequence[object]) -> str:
    return " or ".join(map(str, sizes))


def _mark(item: pytest.Item) -> None:
    if item.get_closest_marker("mpi_skip") or item.get_closest_marker("mpi_break"):
        item.add_marker(pytest.mark.skip(reason="test does not work under mpi"))
    if item.get_closest_marker("mpi_xfail"):
        item.add_marker(pytest.mark.xfail(reason="test fails under mpi"))

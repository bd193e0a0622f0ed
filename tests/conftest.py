"""Fixtures, options and marks of the suite; `mpicoll.testing` makes one pytest run out of N ranks.

    python -m pytest                                    one rank
    python -m mpicoll.run -n 3 -m pytest                the same tests on three
    python -m mpicoll.run -n 3 -m pytest --runslow -k two_gib
    python -m pytest -n 3 -m launch                     the tests that start jobs of their own, three at a time

A test is written once for any number of ranks (1 too): it derives each rank's contribution from the rank's number and
ends in ``agree`` (tests/support/__init__.py). What cannot run everywhere is deselected by a mark, never skipped.
"""

import gc
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from mpicoll._device import streams
from mpicoll._mpi import abort, shared_segment
from mpicoll.testing import _plugin
from mpicoll.testing._reports import show
from tests.support import session, warm, warm_server

# Examples must be the same on all ranks and in every run. A body with collectives must ``agree`` before it fails, or
# only one rank goes on to shrink its example.
hypothesis.settings.register_profile("spmd", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("spmd")

# Folders whose tests need no other rank, unless they are marked: what they show on one rank holds on any number.
ALONE = {"base", "docs", "doctor", "launch", "project", "testing"}
ON_REQUEST = {"slow": "--runslow", "companion": "--companions"}  # marks of tests that run only with an option


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--companions", action="store_true", help="also run the tests of tests/companions; requirements.txt there")
    parser.addoption("--shipped", action="store_true", help="also run tests/shipped, the tests that are in torch's wheel")
    parser.addoption("--only-here", action="store_true", help="run only the tests that are marked for this very number of ranks")
    parser.addoption("--as-if-gpus", action="store_true", help="the CPU's tensors in a world whose ranks see GPUs")
    parser.addoption("--as-if-arm", action="store_true", help="shared memory with the fences that Arm's processors need")
    parser.addoption("--way", default=None, help="direct, ipc or staged: how CUDA tensors should travel in tests/gpu/real")
    parser.addoption("--device", default="cuda", help="device of tests/gpu/real; cpu tries these tests without a GPU")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    _plugin.start(config)  # on one rank, too: its time limit, and what it shows of a test that hangs
    abort.abort = showing(abort.abort)
    if config.getoption("numprocesses", None):  # of pytest-xdist, whose workers inherit this environment
        os.environ[warm.ADDRESS] = warm_server()
    if config.getoption("--as-if-gpus"):
        streams.seen = lambda: True  # messages are announced, and large collectives ask; no evidence of anything more
    if config.getoption("--as-if-arm"):
        shared_segment.ORDERED = frozenset()


def showing(end: Callable[..., None]) -> Callable[..., None]:
    """Returns ``end``, which ends a job of several ranks. It first shows what pytest has captured."""
    process = os.getpid()

    def shown(*arguments: Any) -> None:
        if session().side.size > 1 and os.getpid() == process:
            session().watch.write(show(session().watch.captured()), f"[rank {session().side.rank}] ")
        end(*arguments)

    return shown


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # tests call gc.collect often; each would look at all that torch has made


def runs_here(item: pytest.Item, size: int, kinds: Sequence[str]) -> bool:
    """Whether marks and folder of ``item`` let it run on ``size`` ranks. kinds: of ``ON_REQUEST``, those that were asked for."""
    for_ranks = any(item.get_closest_marker(name) for name in ("ranks", "min_ranks"))  # which the plugin reads
    alone = item.get_closest_marker("launch") is not None or (item.path.parent.name in ALONE and not for_ranks)
    return (
        all(kind in kinds or item.get_closest_marker(kind) is None for kind in ON_REQUEST)
        and (size == 1 or not alone)
        and (item.get_closest_marker("one_node") is None or session().side.one_node)
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    size, only = session().side.size, config.getoption("--only-here")
    kinds = [kind for kind, option in ON_REQUEST.items() if config.getoption(option)]
    chosen = [item for item in items if runs_here(item, size, kinds) and (not only or item.get_closest_marker("ranks"))]
    deselected = [item for item in items if item not in chosen]
    items[:] = chosen
    if deselected:
        config.hook.pytest_deselected(items=deselected)


@pytest.fixture(scope="session")
def size(world_size: int) -> int:
    """Number of ranks in MPI_COMM_WORLD."""
    return world_size


@pytest.fixture(scope="session")
def _end_of_world() -> Iterator[None]:
    yield
    import mpicoll

    if mpicoll.is_initialized():
        mpicoll.destroy_process_group()


@pytest.fixture
def world(_end_of_world: None) -> Any:
    """The default process group, initialised by door 1 once per session (and again if a test has destroyed it)."""
    import mpicoll

    if not mpicoll.is_initialized():
        mpicoll.init_process_group()
    return mpicoll.group.WORLD


@pytest.fixture
def no_world(_end_of_world: None) -> Iterator[None]:
    """Starts without a default process group and leaves none."""
    import mpicoll

    if mpicoll.is_initialized():
        mpicoll.destroy_process_group()
    yield
    if mpicoll.is_initialized():
        mpicoll.destroy_process_group()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds random, numpy and torch from the test's id, equally on all ranks, and returns that seed.

    For numbers that differ between ranks: ``torch.Generator().manual_seed(seed + rank)``.
    """
    value = zlib.crc32(request.node.nodeid.encode())
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002
    torch.manual_seed(value)
    return value

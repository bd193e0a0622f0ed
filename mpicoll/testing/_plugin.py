"""The pytest plugin of the wheel: options, marks, fixtures, and the start of a session of several ranks.

It does nothing but that in a run of one process. ``-p no:mpicoll`` leaves it out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mpicoll._base import inherited, launcher
from mpicoll._mpi.second_process import identity
from mpicoll.testing import _marks, agree, everyone, sessions

if TYPE_CHECKING:
    from mpi4py import MPI

COUNTED = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")  # in the summary of the jobs of --ranks
LIMIT_S = 300  # of a test, unless the project sets another


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mpi", "several ranks (mpicoll)")
    group.addoption("--ranks", metavar="N[,N...]", help="start the tests on N ranks, on each of these numbers in turn")
    group.addoption("--ranks-timeout", type=float, metavar="S", help="seconds until a test on several ranks ends; 0: never")
    parser.addini("ranks_timeout", "the same for the project", default=LIMIT_S)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """``--ranks`` starts the job here, before a conftest imports torch, say."""
    marked: set[str] = getattr(early_config.pluginmanager.rewrite_hook, "_must_rewrite", set())
    marked.discard("mpicoll")  # pytest would compile all of mpicoll anew, since its wheel has a plugin
    ranks = getattr(early_config.known_args_namespace, "ranks", None)
    if ranks is not None:
        from mpicoll.testing import _jobs

        _jobs.run(early_config, ranks)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if size() == 1:
        return
    option = config.option
    refused = {
        "--pdb": getattr(option, "usepdb", False),
        "--trace": getattr(option, "trace", False),
        "-n (pytest-xdist)": getattr(option, "numprocesses", None) or getattr(option, "dist", "no") != "no",
    }
    for name, asked in refused.items():
        if asked:
            why = "ranks share one terminal" if name.startswith("--") else "each rank runs every test, and all at the same time"
            raise pytest.UsageError(f"mpicoll: {name} does not work on {size()} ranks: {why}. Leave it out, or run one process")
    launch = launcher.detect()
    number = 0 if launch is None else launch.rank
    if number != 0:  # files of these names are rank 0's; plugins open them when they are configured
        vars(option).update(dict.fromkeys({"xmlpath", "report_log", "htmlpath"} & {*vars(option)}), log_file=os.devnull)
    if option.basetemp:  # each rank would empty the same folder
        folder = Path(option.basetemp)
        folder.mkdir(parents=True, exist_ok=True)
        option.basetemp = str(folder / f"rank{number}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    _marks.register(config)
    if not config.pluginmanager.hasplugin("pytest_mpi"):
        config.pluginmanager.register(OfPytestMpi(), "mpicoll for pytest-mpi")
    if size() > 1:
        start(config)


def size() -> int:
    """The number of ranks that an MPI launcher has started."""
    launch = launcher.detect()
    if launch is None or not launcher.started_by_mpi():
        return 1
    owner, _, job = os.environ.get(inherited.OWNER, "").partition(" ")
    started_by_a_rank = owner not in ("", str(os.getpid())) and job == identity(os.environ)  # it inherits the rank's variables
    return 1 if started_by_a_rank else launch.size


def start(config: pytest.Config) -> Any:
    """Returns the session of this process, and starts it first if there is none (collective). Works on one rank, too."""
    from mpicoll.testing._session import Session

    if sessions:
        return sessions[0]
    session = Session(config)
    if session.side.size < size():
        raise pytest.UsageError(
            f"mpicoll: the launcher has started {size()} processes, and MPI sees {session.side.size} rank: "
            "mpiexec belongs to another MPI than the one that mpi4py loads. `python -m mpicoll.doctor` shows both"
        )
    sessions.append(session)
    if size() > 1:
        os.environ[inherited.OWNER] = f"{os.getpid()} {identity(os.environ)}"
    config.pluginmanager.register(session, "mpicoll session")
    return session


_deselected = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_deselected] = _marks.choose(config, items, size())


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    words = config.stash.get(_deselected, [])
    return [f"mpi: not on {'1 rank' if size() == 1 else f'{size()} ranks'}: {'; '.join(words)}"] if words else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts = [f"{len(terminalreporter.stats[kind])} {kind}" for kind in COUNTED if kind in terminalreporter.stats]
    if (launcher.detect() or (0, 0))[1] == 0:
        from mpicoll.testing import _jobs

        _jobs.note(", ".join(counts) or "no tests ran", size())


# -- fixtures ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def rank() -> int:
    """The number of this process among the ranks of MPI.COMM_WORLD."""
    launch = launcher.detect()
    return launch.rank if launch is not None and size() > 1 else 0


@pytest.fixture(scope="session")
def world_size() -> int:
    """The number of ranks in MPI.COMM_WORLD."""
    return size()


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """A duplicate of MPI.COMM_WORLD (mpi4py) for this test. The test fails if a message is left in it."""
    from mpicoll._mpi import side_channel

    made = side_channel.communicator()
    yield made
    left = [text for text in everyone(side_channel.unreceived(made)) if text]
    if left:
        pytest.fail("\n".join(left))  # not freed: MPI may still move the message
    made.Free()


@pytest.fixture
def world() -> Iterator[Any]:
    """The default process group of torch over MPI, for this test. The test fails if it leaves a message under way.

    If a rank fails alone, the others leave the operations in which they wait.
    """
    import mpicoll
    from mpicoll._engine.poller import poller
    from mpicoll._engine.registry import registry

    if mpicoll.is_initialized():
        pytest.fail("a test before this one, or a module, has left an initialised process group")
    mpicoll.init_process_group()
    for session in sessions:
        session.watch.release = registry.fail
    yield mpicoll.group.WORLD
    for session in sessions:
        session.watch.release = str
    left = [work for work in poller.under_way() if work.group.broken is None]
    words = [f"{work.operation} of {work.tensor.nbytes} bytes has not ended" for work in left]
    if mpicoll.is_initialized():
        mpicoll.destroy_process_group()
    agree(not left, "; ".join(words))


@pytest.fixture
def shared_path(tmp_path: Path) -> Path:
    """One empty folder for all ranks, the ``tmp_path`` of rank 0. Ranks of several hosts need a file system that they share."""
    return everyone(tmp_path)[0]


class OfPytestMpi:
    """The fixture of pytest-mpi, where that is not installed."""

    @pytest.fixture
    def mpi_tmp_path(self, shared_path: Path) -> Path:
        return shared_path

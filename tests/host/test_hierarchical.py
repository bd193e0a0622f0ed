"""Groups over several nodes, which are pretended here: jobs in which every _MPICOLL_NODE_SIZE ranks are a node of their own."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mpicoll as dist
from mpicoll._algorithms.windows import Windows
from mpicoll._engine.registry import registry
from mpicoll._host import algorithm_choice
from mpicoll._host.algorithm_choice import NATIVE, NEVER, SHARED_MEMORY, WINDOW_FROM, Choices
from mpicoll._mpi.topology import Topology
from tests.behaviour.test_two_machines import REASON
from tests.support import agree, hosts, is_open_mpi, launch

PYTEST = ("-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
NODES = "tests/host/scripts/nodes.py"
EVERYTHING = {"MPICOLL_WINDOW_FROM": "1"}
# Ranks of a node use shared memory; only between nodes MPI is called, by the same functions in every case. So the second MPI runs
# one case of each test; the others run with Open MPI, and with --runslow.
ONE_MPI = () if is_open_mpi() else pytest.mark.slow


def passes(ranks: int, node_size: int, *paths: str, **variables: str) -> None:
    done = launch(ranks, *PYTEST, *paths, timeout_s=150, env={"_MPICOLL_NODE_SIZE": str(node_size), **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout


@pytest.mark.launch
@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("ranks", "node_size", "window_bytes"),
    [
        pytest.param(4, 2, 200 << 10, id="4 by 2, small chunks"),
        pytest.param(4, 2, 64 << 20, id="4 by 2, large chunks", marks=pytest.mark.slow),
        pytest.param(3, 2, 200 << 10, id="3 by 2, small chunks", marks=ONE_MPI),
        pytest.param(3, 2, 64 << 20, id="3 by 2, large chunks", marks=pytest.mark.slow),
        pytest.param(3, 1, 64 << 20, id="3 by 1, large chunks", marks=pytest.mark.slow),
        pytest.param(4, 1, 200 << 10, id="4 by 1, everything by messages", marks=pytest.mark.slow),
    ],
)
def test_over_nodes(ranks: int, node_size: int, window_bytes: int) -> None:
    """Two nodes of two, one of two and one of one, three and four of one: in sizes and places where something could be wrong."""
    small = {"MPICOLL_WINDOW_BYTES": str(window_bytes), **EVERYTHING}
    passes(ranks, node_size, NODES, **(small if window_bytes < 64 << 20 else {}))


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.timeout(200)
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_over_two_hosts(tmp_path: Path) -> None:
    """The same where nothing is pretended: two ranks on each of two machines."""
    with hosts.hosts(2, tmp_path) as machines:
        options = ["--quiet", "--hostfile", str(machines.hostfile(2)), "-n", "4"]
        done = machines.launch(*options, *PYTEST, NODES, timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout


@pytest.mark.launch
@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("ranks", "node_size"), [(2, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((4, 2), (3, 2), (3, 0)))]
)
def test_the_suite_over_nodes(ranks: int, node_size: int) -> None:
    """What holds on one node (0: as it is) holds on several, with everything sent through what is for large messages."""
    names = ("tensors/test_reductions", "tensors/test_reduction_values", "api/test_gathers", "behaviour/test_movement")
    passes(ranks, node_size, *(f"tests/{name}.py" for name in names), **EVERYTHING)


def test_which_way() -> None:
    """Nodes of one rank each have nothing of their own; uneven ones only what needs no equal blocks."""
    choices = Choices()
    least = {sizes: choices.least_between("all_reduce", sizes) for sizes in [(1, 1, 1), (2, 1), (2, 2), (8,) * 4]}
    assert least.pop((1, 1, 1)) == NEVER
    assert set(least.values()) == {choices.between_from["all_reduce"][2]}
    assert choices.least_between("all_gather", (2, 1)) == NEVER
    assert choices.least_between("all_gather", (2, 2)) == choices.between_from["all_gather"][2]
    assert Choices(window_bytes=0).least_between("broadcast", (2, 2)) == NEVER
    assert [algorithm_choice.of_group(choices, (1,) * ranks).direct_from for ranks in (1, 2, 8)] == [NEVER, 64 << 10, 512 << 10]


def test_many_nodes_leave_no_room_for_a_piece_of_every_rank() -> None:
    """Which two operations want; the others go on. (All of them gave up.)"""
    own = Choices(between_from={name: {2: 1} for name in WINDOW_FROM})
    few, many = (algorithm_choice.of_group(own, (64,) * nodes).least for nodes in (16, 200))
    assert max(few.values()) < NEVER
    assert {operation for operation, least in many.items() if least == NEVER} == {"reduce_scatter", "all_gather"}


def test_one_operation_without_a_window_does_not_take_it_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that was tuned may say so of all_reduce. (Nothing went through the window then.)"""
    known = algorithm_choice.of_group(Choices(window_from={**WINDOW_FROM, "all_reduce": {2: NEVER}}), (4,))
    assert algorithm_choice.all_reduce(known, 1 << 30) == NATIVE
    assert algorithm_choice.broadcast(known, 1 << 30) == SHARED_MEMORY
    channel = SimpleNamespace(comm=SimpleNamespace(Get_rank=lambda: 0))
    made, window = Windows(channel, Topology((0,) * 4, crowded=False), Choices().chunk, lambda: False), SimpleNamespace()  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_window_of", lambda ranks, most: window)
    assert made.make()
    assert made.window is window
    made.close()
    assert not made.make()


@pytest.mark.usefixtures("world")
def test_a_window_made_in_inference_mode(rank: int, size: int) -> None:
    """It is of no such memory: it is written outside, too. (It was, and that raised.)"""
    group = registry.create("inference", list(range(size)), 60)
    results = []
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            tensor = torch.full((1 << 18,), rank + 1.0)
            group.all_reduce(tensor)
            group.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True).wait()  # type: ignore[union-attr]
            results.append(bool((tensor == size * (size + 1) / 2).all()))
    group.close()
    agree(all(results), results)

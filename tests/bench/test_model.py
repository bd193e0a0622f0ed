"""The model of what collectives cost: formulas against sums done by hand and by the textbook, and the page against the module."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mpicoll.bench import options
from mpicoll.bench.model import command, page
from mpicoll.bench.model.algorithms import ITEM, OPERATIONS, Algorithm, best, take_overs
from mpicoll.bench.model.costs import ModelMachine
from tests.support import ROOT

PAGE = ROOT / "docs" / "model.md"
FAST = 1e30  # bytes per second, so that it costs nothing
# A message between nodes takes 10 s and a second per byte, one more for each that shares the card; within a node a second.
SIMPLE = ModelMachine(2, 1, 10.0, 1.0, 1.0, 1.0, FAST, FAST, 2, 0.0, 0.0)
REDUCING = replace(SIMPLE, core_bandwidth=1.0)  # and a second for each byte that a core reads or writes


def algorithm(operation: str, name: str) -> Algorithm:
    return next(algorithm for algorithm in OPERATIONS[operation] if algorithm.name == name)


def cost(operation: str, name: str, machine: ModelMachine, nbytes: int) -> float:
    return algorithm(operation, name).cost(machine, nbytes)


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "name", "nodes", "ranks", "nbytes", "seconds"),
    [
        ("all_reduce", "recursive doubling", 2, 2, 8, 1 + (10 + 1 + 2 * 8)),
        ("all_reduce", "recursive doubling", 3, 1, 12, 3 * (10 + 12)),
        ("all_reduce", "recursive doubling", 1, 4, 8, 2 * 1),
        ("all_reduce", "Rabenseifner", 2, 2, 16, 2 * 1 + 2 * (10 + 1 + 2 * 4)),
        ("all_reduce", "ring", 2, 2, 16, 6 * (10 + 4)),
        ("all_reduce", "rails", 2, 2, 64, 2 * 1 + (10 + 64)),
        ("all_reduce", "rails", 2, 2, 128, 2 * 1 + (10 + 1 + 2 * 64)),
        ("all_reduce_half_precision", "as float32", 2, 1, 8, 10 + 16),
        ("all_reduce_half_precision", "direct", 2, 1, 8, (10 + 4) + (10 + 4)),
        ("all_reduce_half_precision", "rails", 2, 2, 64, 2 * 1 + (10 + 128)),
        ("reduce_scatter", "recursive halving", 2, 2, 16, (10 + 1 + 2 * 8) + 1),
        ("reduce_scatter", "pairwise", 2, 2, 16, 2 * (10 + 4) + (10 + 1 + 2 * 4)),
        ("all_gather", "recursive doubling", 2, 2, 16, 1 + (10 + 1 + 2 * 8)),
        ("all_gather", "Bruck", 3, 1, 12, (10 + 4) + (10 + 4)),
        ("all_gather", "Bruck", 2, 2, 16, (10 + 4) + (10 + 1 + 2 * 8)),
        ("all_gather", "ring", 2, 2, 16, 3 * (10 + 4)),
        ("broadcast", "binomial", 2, 2, 8, (10 + 8) + 1),
        ("all_to_all", "Bruck", 3, 1, 12, (10 + 4) + (10 + 4)),
        ("all_to_all", "all at once", 2, 2, 16, 10 + 3 + 4 * 4),
    ],
)
def test_what_has_no_textbook_by_hand(operation: str, name: str, nodes: int, ranks: int, nbytes: int, seconds: float) -> None:
    assert cost(operation, name, replace(SIMPLE, nodes=nodes, ranks=ranks), nbytes) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("operation", "name", "ranks", "nbytes", "seconds"),
    [
        ("all_reduce", "window, flat", 2, 8, 1 + (2 + 2 + 1) * 8),  # lays 8 down, reads both, writes
        ("all_reduce", "window, sliced", 2, 8, 2 * 1 + 8 + 8 + 4 + 16),  # a half, reads both halves, writes one, takes all
        ("all_reduce", "recursive doubling", 2, 8, 1 + 4 * 8 + 3 * 8),
        ("reduce_scatter", "window", 2, 8, 1 + 8 + 8 + 4),
        ("all_gather", "window", 2, 8, 1 + 8 + 8),
        ("broadcast", "window", 2, 8, 1 + 16 + 16),
        ("all_to_all", "window", 2, 8, 2 * 1 + 8 + 8 + 8),
    ],
)
def test_a_window_by_hand(operation: str, name: str, ranks: int, nbytes: int, seconds: float) -> None:
    machine = replace(REDUCING, nodes=1, ranks=ranks)
    assert cost(operation, name, machine, nbytes) == pytest.approx(seconds)


def test_ranks_share_the_memory() -> None:
    machine = replace(REDUCING, nodes=1, ranks=8, memory_bandwidth=4.0)
    assert machine.memory(10) == 20
    assert machine.memory(10, 2) == 10
    assert replace(machine, ranks=1, beside=8).memory(10) == 20


def test_calls_and_looks_grow_with_the_ranks() -> None:
    machine = replace(SIMPLE, nodes=1, ranks=4, call_s=100.0, look_s=0.25)
    assert cost("all_reduce", "window, flat", machine, 8) == pytest.approx(1 + 3 * 0.25 + 3 * 4 * 100)


# -- by the textbook ---------------------------------------------------------------------------------------------------

# a, b, c: alpha, beta, gamma; k = lg p; copied: seconds to read and write a byte
Textbook = Callable[[float, float, float, float, float, int, int], float]
TEXTBOOK: dict[tuple[str, str], Textbook] = {
    ("all_reduce", "recursive doubling"): lambda a, b, c, copied, n, p, k: k * (a + n * b + n * c),
    ("all_reduce", "Rabenseifner"): lambda a, b, c, copied, n, p, k: 2 * k * a + (p - 1) / p * n * (2 * b + c),
    ("all_reduce", "ring"): lambda a, b, c, copied, n, p, k: 2 * (p - 1) * a + (p - 1) / p * n * (2 * b + c),
    ("reduce_scatter", "recursive halving"): lambda a, b, c, copied, n, p, k: k * a + (p - 1) / p * n * (b + c),
    ("reduce_scatter", "ring"): lambda a, b, c, copied, n, p, k: (p - 1) * a + (p - 1) / p * n * (b + c),
    ("reduce_scatter", "pairwise"): lambda a, b, c, copied, n, p, k: (p - 1) * a + (p - 1) / p * n * (b + c),
    ("all_gather", "recursive doubling"): lambda a, b, c, copied, n, p, k: k * a + (p - 1) / p * n * b,
    ("all_gather", "Bruck"): lambda a, b, c, copied, n, p, k: k * a + (p - 1) / p * n * b + n * copied,
    ("all_gather", "ring"): lambda a, b, c, copied, n, p, k: (p - 1) * a + (p - 1) / p * n * b,
    ("broadcast", "binomial"): lambda a, b, c, copied, n, p, k: k * (a + n * b),
    ("broadcast", "scatter + doubling"): lambda a, b, c, copied, n, p, k: 2 * k * a + 2 * (p - 1) / p * n * b,
    ("broadcast", "scatter + ring"): lambda a, b, c, copied, n, p, k: (k + p - 1) * a + 2 * (p - 1) / p * n * b,
    ("all_to_all", "pairwise"): lambda a, b, c, copied, n, p, k: (p - 1) * a + (p - 1) / p * n * b,
    ("all_to_all", "Bruck"): lambda a, b, c, copied, n, p, k: k * (a + n / 2 * b + n * copied) + 2 * n * copied,
    ("all_to_all", "all at once"): lambda a, b, c, copied, n, p, k: 2e-6 * (p - 1) + a + (p - 1) / p * n * b,
}


@pytest.mark.parametrize(("operation", "name"), list(TEXTBOOK))
def test_one_rank_a_node_is_the_textbook(operation: str, name: str) -> None:
    for p in (2, 4, 8, 64, 1024):
        machine = ModelMachine(p, 1, gap_s=0.0)
        per_byte = 1 / machine.core_bandwidth
        for n in (p * ITEM, 1 << 20, 1 << 30):
            told = TEXTBOOK[operation, name](1.5e-6, 1 / 12.5e9, 3 * per_byte, 2 * per_byte, n, p, p.bit_length() - 1)
            assert cost(operation, name, machine, n) == pytest.approx(told)


def test_every_textbook_formula_is_tested() -> None:
    assert {(operation, one.name) for operation, all_ in OPERATIONS.items() for one in all_ if one.textbook} == set(TEXTBOOK)


def test_the_first_take_over_is_where_the_formulas_meet() -> None:
    a, b, c = 1.5e-6, 1 / 12.5e9, 3 / 20e9
    meet = 2 * a / (2 * (b + c) - 3 / 4 * (2 * b + c))  # lg 4 (a + nb + nc) = 2 lg 4 a + 3/4 n (2b + c)
    first, second, *_ = take_overs("all_reduce", ModelMachine(4, 1, gap_s=0.0), (4, 1 << 30))
    assert (first.name, second.name) == ("recursive doubling", "Rabenseifner")
    assert second.nbytes == math.ceil(meet)


# -- how it grows ------------------------------------------------------------------------------------------------------

EVERYTHING = [(operation, one.name) for operation, all_ in OPERATIONS.items() for one in all_]
MACHINES = [ModelMachine(nodes, ranks) for nodes in (1, 2, 3, 16, 1024) for ranks in (1, 2, 6, 64) if nodes * ranks > 1]


@pytest.mark.parametrize(("operation", "name"), EVERYTHING)
def test_more_bytes_never_cost_less(operation: str, name: str) -> None:
    for machine in MACHINES:
        found = [cost(operation, name, machine, 8**power) for power in range(1, 11)]
        finite = [seconds for seconds in found if math.isfinite(seconds)]
        assert finite == sorted(finite), machine
        assert all(seconds > 0 for seconds in finite), machine


@pytest.mark.parametrize("operation", ["all_reduce", "all_reduce_half_precision", "all_to_all"])
def test_more_nodes_never_cost_less(operation: str) -> None:
    for one in OPERATIONS[operation]:
        for ranks in (1, 2, 64):
            found = [one.cost(ModelMachine(nodes, ranks), 1 << 26) for nodes in (2, 4, 16, 64, 256, 1024)]
            finite = [seconds for seconds in found if math.isfinite(seconds)]
            assert finite == sorted(finite), (one.name, ranks)


@pytest.mark.parametrize(("operation", "name"), EVERYTHING)
def test_a_worse_machine_never_costs_less(operation: str, name: str) -> None:
    for worse in ({"latency_s": 1e-3}, {"bandwidth": 1e6}, {"memory_bandwidth": 1e6}, {"node_latency_s": 1e-3}, {"call_s": 1e-3}):
        for machine in MACHINES:
            assert cost(operation, name, replace(machine, **worse), 1 << 24) >= cost(operation, name, machine, 1 << 24), worse


@pytest.mark.parametrize("nodes", [4, 64, 1024])
def test_few_bytes_cost_latencies_and_many_cost_bandwidth(nodes: int) -> None:
    machine = ModelMachine(nodes, 1, gap_s=0.0)
    steps = nodes.bit_length() - 1
    assert cost("all_reduce", "recursive doubling", machine, 1) == pytest.approx(steps * 1.5e-6, rel=1e-3)
    per_byte = (nodes - 1) / nodes * (2 / 12.5e9 + 3 / 20e9)
    for name in ("Rabenseifner", "ring"):
        assert cost("all_reduce", name, machine, 1 << 50) / (1 << 50) == pytest.approx(per_byte, rel=1e-3)
    few, many = best("all_reduce", machine, 8), best("all_reduce", machine, 1 << 30)
    assert few is not None
    assert many is not None
    assert (few.name, many.name) == ("recursive doubling", "Rabenseifner")


def test_who_begins_with_the_farthest_sends_so_many_times_more_out() -> None:
    machine = ModelMachine(
        4, 8, latency_s=0.0, bandwidth=1.0, gap_s=0.0, node_latency_s=0.0, memory_bandwidth=FAST, core_bandwidth=FAST
    )
    n = 1 << 20
    assert cost("all_reduce", "Rabenseifner", machine, n) == pytest.approx(2 * n * 3 / 4)
    assert cost("reduce_scatter", "recursive halving", machine, n) == pytest.approx(8 * n * 3 / 4)
    assert cost("all_to_all", "pairwise", machine, n) == pytest.approx(8 * n * 3 / 4)


# -- where each takes over ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (1, 64), (2, 2), (12, 1), (12, 6), (1024, 64)])
def test_take_overs_are_those_of_the_table(operation: str, nodes: int, ranks: int) -> None:
    machine = ModelMachine(nodes, ranks)
    found = take_overs(operation, machine, command.SIZES)
    assert [over.after for over in found] == [None, *(over.name for over in found[:-1])]
    for over in found:
        if over.after is not None:
            assert names(operation, machine, [over.nbytes - 1, over.nbytes]) == [over.after, over.name]
    for nbytes in command.SIZES:
        last = [over.name for over in found if over.nbytes <= nbytes][-1:]
        assert names(operation, machine, [nbytes]) == (last or [None])


def names(operation: str, machine: ModelMachine, sizes: Sequence[int]) -> list[str | None]:
    found = [best(operation, machine, nbytes) for nbytes in sizes]
    return [one.name if one is not None else None for one in found]


def test_there_is_a_best_one_from_an_element_a_rank_on() -> None:
    for operation in OPERATIONS:
        for machine in MACHINES:
            assert best(operation, machine, ITEM * machine.size) is not None, (operation, machine)


def test_sizes_are_those_of_the_algorithms() -> None:
    assert ModelMachine(1, 2).chunk == 1 << 20
    assert ModelMachine(1, 64).chunk == 500 << 10


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_holds_what_the_module_prints() -> None:
    text = PAGE.read_text()
    between = text.split("<!-- model -->\n")[1].split("<!-- /model -->")[0]
    assert between == page.markdown() + "\n", (
        "docs/model.md is not what `python -m mpicoll.bench model --markdown` prints; put that between its markers"
    )
    assert text.index("<!-- growth -->") < text.index("<!-- /growth -->")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 us"), (1.2345e-6, "1.23 us"), (9.999e-4, "1000 us"), (0.0123, "12.3 ms"), (234.5, "234 s")]
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert page.spell_time(seconds) == text
    assert page.spell_time(math.inf) == "-"


# -- the command -------------------------------------------------------------------------------------------------------


def run(*words: str) -> int:
    return command.main(options.read(["model", *words], ""))


def test_prints_times_and_marks_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nodes", "4", "--ranks-per-node", "1", "--latency", "10", "--bandwidth", "1", "--sizes", "8", "16MiB") == 0
    said = capsys.readouterr().out
    assert said.startswith("4 nodes x 1 rank; network 10 us, 1 GB/s")
    small, large = (line.split() for line in said.splitlines() if line.startswith(("      8 B", "   16 MiB")))
    assert small == ["8", "B", "20.0*", "-", "-"]
    assert large[3].endswith("*")
    assert "rails" not in said, "one rank a node"
    assert "Rabenseifner, after recursive doubling" in said


@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize("network", list(command.NETWORKS))
def test_every_operation_on_every_network(operation: str, network: str, capsys: pytest.CaptureFixture[str]) -> None:
    for nodes, ranks in (("1", "2"), ("3", "5"), ("1024", "128")):
        assert run("--operation", operation, "--network", network, "--nodes", nodes, "--ranks-per-node", ranks) == 0
        said = capsys.readouterr().out
        assert f"{operation}, microseconds" in said
        assert "*" in said
        assert "nan" not in said
        assert "inf" not in said.replace("infiniband", "")


def test_too_few_elements_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--operation", "all_gather", "--sizes", "8") == 0
    assert "fewer elements than ranks" in capsys.readouterr().out.splitlines()[-1]


def test_one_rank_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Other lines that are refused are in test_bench.py."""
    monkeypatch.setattr("mpicoll.bench.overview.rank", lambda: 0)
    with pytest.raises(SystemExit):
        run("--nodes", "1", "--ranks-per-node", "1")
    assert "one rank has nobody to send to" in capsys.readouterr().err


def test_csv_has_a_line_for_each_size_and_algorithm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.csv"
    assert run("--csv", str(file), "--sizes", "8", "1MiB") == 0
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["algorithm"] for row in rows if row["bytes"] == "8"] == ["recursive doubling", "rails"]
    assert len([row for row in rows if row["bytes"] == str(1 << 20)]) == 4
    for nbytes in ("8", str(1 << 20)):
        of_size = [row for row in rows if row["bytes"] == nbytes]
        assert min(of_size, key=lambda row: float(row["seconds"]))["best"] == "1"
        assert sum(int(row["best"]) for row in of_size) == 1


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "out.png"
    assert run("--plot", str(file)) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_markdown_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--markdown") == 0
    assert capsys.readouterr().out == page.markdown() + "\n"

"""What decides between algorithms: the table, the file that `bench tune` writes, the variables, and that rank 0's count."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mpicoll._algorithms.window import Window, parts, words_nbytes
from mpicoll._host import algorithm_choice as choice
from mpicoll._host.algorithm_choice import APART, BETWEEN, DIRECT, NATIVE, NEVER, PAGE, WINDOW_FROM, WITHIN, Choices
from mpicoll.bench import tune
from tests.support import launch


def test_the_next_lower_number_of_ranks_counts() -> None:
    known = Choices(window_from={"all_reduce": {2: 100, 8: 300}})
    assert [known.least("all_reduce", ranks) for ranks in (2, 3, 7, 8, 64)] == [100, 100, 100, 300, 300]


@pytest.mark.parametrize("library", ["Open MPI v5.0.11", "MPICH Version: 5", "another MPI"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_buckets_of_gradients_go_through_the_window(library: str, ranks: int) -> None:
    """DDP's first bucket has 1 MiB. Up to 8 MiB two ranks called Open MPI, which kept the core from the backward pass."""
    known = choice.of_group(choice.choices(library), [ranks])
    assert choice.all_reduce(known, 1 << 20) == choice.SHARED_MEMORY


@pytest.mark.parametrize("name", choice.MEASURED)
def test_a_window_of_many_ranks_reduces_no_small_tensors(name: str) -> None:
    """64 ranks took MPICH's figure of 4 ranks, 1 KiB, for which a rank called 64 kernels on 16 bytes each."""
    found = choice.choices(name)
    for operation, measured in choice.MEASURED[name].items():
        assert [found.least(operation, ranks) for ranks in (2, 3, 4, 7)] == [measured[n] for n in (2, 2, 4, 4)]
        each = choice.EACH_FROM.get(operation, 0)
        assert all(found.least(operation, ranks) == max(measured[4], ranks * each) for ranks in (8, 64, 128))
    assert found.least("all_reduce", 128) >= 128 << 10


def test_a_variable_counts_for_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_WINDOW_FROM", "1")
    assert choice.choices("MPICH").least("all_reduce", 64) == 1


@pytest.mark.parametrize(("operation", "most"), [("all_reduce", 64), ("reduce", 64), ("reduce_scatter", 32)])
def test_many_nodes_reduce_by_mpi(operation: str, most: int) -> None:
    """1,024 nodes of one rank each sent 2,046 messages of 8 KiB from Python for every 8 MiB, of a tensor of any size."""
    choose = getattr(choice, operation)
    found = {nodes: choose(choice.of_group(Choices(), [1] * nodes), 1 << 40) for nodes in (4, most, most + 1, 1024)}
    assert found == {4: DIRECT, most: DIRECT, most + 1: NATIVE, 1024: NATIVE}


def test_many_nodes_exchange_half_precision_and_blocks() -> None:
    groups = {nodes: choice.of_group(Choices(), [1] * nodes) for nodes in (128, 129, 1024)}
    assert [choice.all_reduce(known, 1 << 30, widened=True) for known in groups.values()] == [DIRECT, NATIVE, NATIVE]
    known = groups[1024]
    assert choice.all_gather(known, [1 << 20] * 1024) == choice.broadcast(known, 1 << 30) == DIRECT
    assert choice.all_gather(known, [1 << 19] * 1024) == choice.broadcast(known, 1 << 28) == NATIVE


def test_many_ranks_or_nodes_leave_the_network_to_mpi() -> None:
    """A slot had 448 bytes for each of 512 ranks, so that a rank made 150,528 copies for 64 MiB of a reduce_scatter."""
    known = {(nodes, ranks): choice.of_group(Choices(), [ranks] * nodes) for nodes in (8, 16, 64) for ranks in (2, 8, 64)}

    def uses(choose: Callable[[choice.Thresholds, int], str]) -> list[tuple[int, int]]:
        return [shape for shape, each in known.items() if choose(each, 1 << 40) != NATIVE]

    assert uses(choice.all_reduce) == [(8, 2), (8, 8), (16, 2), (16, 8), (64, 2), (64, 8)]
    assert uses(choice.reduce_scatter) == [(8, 8), (16, 8), (64, 8)]


def test_a_measured_table_decides_between_nodes() -> None:
    """The rules of the model hold for the default alone."""
    assert Choices(between_from={"all_gather": {2: 1}}).least_between("all_gather", (2,) * 8) == 1
    assert Choices().least_between("all_gather", (2,) * 8) == NEVER
    assert Choices().least_between("all_gather", (2, 2)) == 128 << 10  # measured


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 64, 128, 1000])
def test_chunks_grow_with_the_threads_of_a_rank(ranks: int) -> None:
    """Each thread of a rank has a slice of at least 128 KiB to reduce, unless the window would take more than 64 MiB."""
    choices = Choices()
    chunks = [choices.chunk(ranks, threads=threads) for threads in range(1, 65)]
    assert chunks[0] == choices.chunk(ranks) <= 1 << 20
    assert chunks == sorted(chunks)
    for threads, chunk in enumerate(chunks, 1):
        segment = Window.nbytes(ranks, chunk) - words_nbytes(ranks)
        assert segment <= 64 << 20
        assert chunk % PAGE == 0
        if threads > 1:
            full = segment > (64 << 20) - parts(ranks) * PAGE
            assert full or chunk // ranks >= threads * 128 << 10, (threads, chunk)


def test_no_window_for_one_rank_or_without_memory() -> None:
    assert Choices().least("all_reduce", 1) == NEVER
    assert Choices(window_bytes=0).least("all_reduce", 4) == NEVER


def test_variables_and_file_decide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    tune.write(file, WITHIN, {"all_reduce": 4096, "broadcast": NEVER}, 2, {"cpu": "any"})
    tune.write(file, BETWEEN, {"all_reduce": 5000}, 4, {"cpu": "any"})
    tune.write(file, APART, {"all_reduce": 6001, "reduce": NEVER}, 4, {"cpu": "any"})
    monkeypatch.setenv("MPICOLL_TUNING", str(file))
    found = choice.choices()
    assert found.least("all_reduce", 2) == 4096
    assert found.least("broadcast", 2) == NEVER
    assert found.window_from["reduce"] == WINDOW_FROM["reduce"]  # what the file does not say
    assert [found.least_between("all_reduce", (2,) * nodes) for nodes in (2, 4, 9)] == [5000] * 3
    assert found.between_from["reduce"] == choice.BETWEEN_FROM["reduce"]
    assert [found.least_apart("all_reduce", nodes) for nodes in (2, 4, 9)] == [2 * 1501, 4 * 1501, 9 * 1501]
    assert found.least_apart("reduce", 4) == NEVER
    assert found.apart_from["broadcast"] == choice.APART_FROM["broadcast"]
    monkeypatch.setenv("MPICOLL_WINDOW_FROM", "77")
    assert choice.choices().least("all_reduce", 5) == 77
    assert choice.choices().least_apart("all_reduce", 5) == 5 * 77


@pytest.mark.parametrize(
    "text", [None, "{}", "nonsense", '{"window_from": {"all_reduce": {"two": 1}}}', '{"window_from": {"sort": {"2": 1}}}']
)
def test_a_file_that_is_no_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "table.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("MPICOLL_TUNING", str(file))
    with pytest.raises(ValueError, match=r"MPICOLL_TUNING=.*table.json: not a table of `python -m mpicoll.bench tune`"):
        choice.choices()


def test_each_mpi_has_a_table_and_an_unknown_one_takes_the_larger_figures() -> None:
    ours, theirs = (choice.choices(name).window_from["broadcast"][2] for name in ("Open MPI v5.0.11", "MPICH Version: 5"))
    assert (ours, theirs) == tuple(choice.MEASURED[name]["broadcast"][2] for name in ("Open MPI", "MPICH"))
    assert choice.choices("Another MPI").window_from["broadcast"][2] == max(ours, theirs)
    for table in (*choice.MEASURED.values(), choice.BETWEEN_FROM, choice.APART_FROM):
        assert set(table) == set(WINDOW_FROM)


def test_the_window_takes_over_where_it_stays_ahead() -> None:
    assert tune.takes_over([1, 2, 4, 8], [0.5, 1.5, 0.9, 0.8]) == 4
    assert tune.takes_over([1, 2, 4, 8], [0.5, 0.5, 0.9, 1.0]) == 1
    assert tune.takes_over([1, 2, 4, 8], [0.5, 0.5, 0.9, 1.1]) == NEVER


def test_a_table_keeps_what_it_knows_of_other_numbers_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    for ranks, least in ((2, 10), (8, 30), (2, 20)):
        tune.write(file, WITHIN, {"all_reduce": least}, ranks, {})
    tune.write(file, BETWEEN, {"all_reduce": 40}, 2, {})
    assert json.loads(file.read_text())["window_from"] == {"all_reduce": {"2": 20, "8": 30}}
    assert choice.load(file) == {WITHIN: {"all_reduce": {2: 20, 8: 30}}, BETWEEN: {"all_reduce": {2: 40}}, APART: {}}


@pytest.mark.parametrize("operation", WINDOW_FROM)
def test_what_tune_compares(operation: str) -> None:
    """mpicoll's algorithm and MPI's. For half precision, too, MPI's must not be replaced by a direct exchange."""
    apart = choice.of_group(Choices(), (1, 1, 1, 1))
    choose = {
        "halves": lambda known, nbytes: choice.all_reduce(known, nbytes, widened=True),
        "all_gather": lambda known, nbytes: choice.all_gather(known, [nbytes // 4] * 4),
    }.get(operation, getattr(choice, operation, None))
    ways = [{choose(tune.only(apart, operation, least), nbytes) for nbytes in (1 << 10, 1 << 20)} for least in (1, NEVER)]
    assert ways == [{DIRECT}, {NATIVE}]


@pytest.mark.launch
def test_rank_0s_choices_are_everybodys(tmp_path: Path) -> None:
    """Ranks that chose otherwise would wait for each other: here each rank's variable says something else."""
    script = tmp_path / "choices.py"
    script.write_text(
        "import os\n"
        "rank = os.environ.get('PMIX_RANK', os.environ.get('PMI_RANK'))\n"
        "os.environ['MPICOLL_WINDOW_FROM'] = {'0': '64', '1': '1000000'}[rank]\n"
        "import torch, mpicoll as dist\n"
        "from mpicoll._api import groups\n"
        "dist.init_process_group()\n"
        "assert groups.of(None).host.thresholds.least['all_reduce'] == 64\n"
        "x = torch.ones(1000)\n"
        "dist.all_reduce(x)\n"
        "assert groups.of(None).host.windows.window.turn == 1 and x.eq(2).all()\n"
        "print('agreed\\n', end='', flush=True)\n"
    )
    done = launch(2, str(script))
    assert (done.returncode, done.stdout.count("agreed")) == (0, 2), done.stderr


@pytest.mark.launch
def test_a_wrong_variable_of_rank_0_is_an_error_on_all_ranks() -> None:
    code = (
        "import mpicoll as dist\n"
        "try: dist.init_process_group()\n"
        "except ValueError as error: print(f'refused: {error}\\n', end='', flush=True)"
    )
    done = launch(2, "-c", code, env={"MPICOLL_WINDOW_BYTES": "many"})
    assert done.stdout.count("refused: MPICOLL_WINDOW_BYTES='many' is not allowed; use a whole number of at least 0 (bytes)") == 2


@pytest.mark.launch
@pytest.mark.parametrize(
    ("ranks", "node_size", "table", "number"), [(2, 0, WITHIN, 2), (3, 2, BETWEEN, 2), (4, 2, BETWEEN, 2), (3, 1, APART, 3)]
)
def test_tune_writes_a_table_that_is_read(tmp_path: Path, ranks: int, node_size: int, table: str, number: int) -> None:
    file = tmp_path / "table.json"
    pretended = {"_MPICOLL_NODE_SIZE": str(node_size)} if node_size else {}
    done = launch(ranks, "-m", "mpicoll.bench", "tune", "--quick", "--out", str(file), timeout_s=100, env=pretended)
    assert done.returncode == 0, done.stderr
    assert f"use it with MPICOLL_TUNING={file}" in done.stdout
    found = choice.load(file)[table]
    assert set(found) == set(WINDOW_FROM) - (choice.EVEN if (ranks, table) == (3, BETWEEN) else set())
    assert {n for sizes in found.values() for n in sizes} == {number}

"""The benchmarks run, check their results first and print what they say they print; figures are not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpicoll.bench import formulas, options, patterns
from mpicoll.bench.messages import MESSAGES
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.row import API, BACKEND, COPY, GLOO, RAW, Row
from tests.support import launch

BENCH = ("-m", "mpicoll.bench")

# A library that does nothing, in the place of one way
LAZY = """
import mpicoll.bench.__main__ as bench, {module}
{module}.{name} = lambda *arguments: None
bench.main(["{name}", "--quick", "--sizes", "64"])
"""

# Another device than the CPU, which is the CPU all the same
PRETENDED = """
import torch
import mpicoll.bench.__main__ as bench
from mpicoll.bench import options
from mpicoll._device import streams
settled = []
options._check_device = lambda made, found: setattr(found, "impl", list(options.WAYS))
streams.own_device = lambda place: torch.device("cpu", 0)
streams.settle = settled.append
status = bench.main(["all_gather", "--device", "cuda", "--quick", "--sizes", "64KiB"])
assert status == 0 and settled
"""
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


def first_words(text: str) -> list[str]:
    return [line.split("  ")[0].strip() or line.strip().split("  ")[0] for line in text.splitlines() if "[" in line][1:]


def test_help_lists_all_that_can_be_measured() -> None:
    assert [*options.HELP] == [*COLLECTIVES, *MESSAGES, "tune"]
    assert [*formulas.OPS] == [*patterns.FOLDS]


@pytest.mark.launch
def test_help_needs_neither_mpi_nor_torch() -> None:
    """Where MPI is still to be installed. It ended in a traceback."""
    without = "import sys; sys.modules.update(torch=None, mpi4py=None)"
    code = f"{without}; import mpicoll.bench.__main__ as bench; bench.main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "exchange" in done.stdout


@pytest.mark.launch
def test_all_reduce_is_the_default_and_prints_a_row_for_each_size() -> None:
    result = launch(2, *BENCH, "--sizes", "8", "4KiB", "--repeat", "2", "--quick")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("2 ranks, ")
    assert first_words(result.stdout) == ["8 B", "4 KiB"], result.stdout


@pytest.mark.launch
def test_threads_of_each_rank(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["all_reduce", "--quick", "--sizes", "1MiB", "--threads", "2", "--impl", "mpicoll", "--json", str(file)]
    result = launch(2, *BENCH, *words)
    assert result.returncode == 0, result.stderr
    assert "; 2 torch threads per rank\n" in result.stdout
    assert json.loads(file.read_text())["machine"]["threads"] == 2


@pytest.mark.launch
def test_tensors_on_another_device() -> None:
    """Their calls are waited for, MPI's own takes the host's memory, the floor is the device's, and NCCL says why not."""
    result = launch(2, "-c", PRETENDED)
    assert result.returncode == 0, result.stderr
    assert first_words(result.stdout)[0] == "64 KiB", result.stdout
    assert "NCCL left out: " in result.stdout


@pytest.mark.launch
def test_the_file_holds_every_way(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = launch(2, *BENCH, "broadcast", "--quick", "--dtypes", "float32", "bfloat16", "--json", str(file))
    assert result.returncode == 0, result.stderr
    facts = json.loads(file.read_text())
    assert facts["machine"]["ranks"] == 2
    ways = {(row["dtype"], row["bytes"]): set(row["ways"]) for row in facts["rows"]}
    apis = {API, BACKEND, GLOO}
    assert ways["float32", 8] == apis | {RAW}
    assert ways["bfloat16", 8] == apis
    assert ways["float32", 65536] >= apis | {RAW, COPY}
    assert facts["rows"][0]["ways"][API]["ratios"][GLOO] > 0


@pytest.mark.launch
def test_dtypes_without_the_op_are_skipped_and_said() -> None:
    words = ["--sizes", "64", "--dtypes", "int16", "bool", "--ops", "SUM", "AVG", "BXOR"]
    result = launch(2, *BENCH, "reduce_scatter_tensor", "--quick", *words)
    assert result.returncode == 0, result.stderr
    assert first_words(result.stdout) == ["64 B"] * 5, result.stdout
    assert "skipped: reduce_scatter_tensor bool AVG" in result.stdout


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--sizes", "7"], "multiples of 4"),
        (["--sizes", "8x"], "'8x' is no size"),
        (["all_gather", "--dtypes", "float23"], "no dtype"),
        (["all_reduce", "--ops", "MEDIAN"], "MEDIAN"),
        (["broadcast", "--ops", "SUM"], "broadcast has no option --ops"),
        (["tune", "--device", "cpu"], "tune has no option --device"),
        (["latency", "--out", "table.json"], "latency has no option --out"),
        (["barrier", "--json", "/nowhere/at/all.json"], "no such folder"),
        (["all_reduce", "--impl", "nccl"], "--impl nccl: NCCL takes a GPU's tensors only, with --device cuda"),
        (["all_reduce", "--repeat", "0"], "--repeat: '0': 1 or more"),
        (["all_reduce", "--repeat", "many"], "--repeat: 'many': 1 or more"),
        (["all_reduce", "--sizes", "1MB2"], "--sizes/--bytes: '1MB2' is no size"),
        (["all_reduce", "--sizes", "0"], "--sizes/--bytes: '0': a size is 1 byte or more"),
        (["tune", "--threads", "0"], "--threads: '0': 1 or more"),
        pytest.param(["all_reduce", "--device", "cuda"], "--device cuda: torch sees no GPU here", marks=WITHOUT_GPU),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    words: list[str], what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpicoll.bench.options.rank", lambda: 0)
    with pytest.raises(SystemExit) as ending:
        options.read(words)
    assert ending.value.code == 2
    said = capsys.readouterr()
    assert what in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


@pytest.mark.launch
@pytest.mark.parametrize("what", ["latency", "tune"])
def test_one_rank_is_not_enough(what: str) -> None:
    result = launch(1, *BENCH, what, "--quick")
    assert result.returncode == 1
    assert "needs two ranks" in result.stderr


@pytest.mark.launch
@pytest.mark.parametrize(("what", "ranks"), [("exchange", 2), ("bandwidth", 3)])
def test_messages(what: str, ranks: int) -> None:
    result = launch(ranks, *BENCH, what, "--quick", "--sizes", "64KiB")
    assert result.returncode == 0, result.stderr
    assert first_words(result.stdout) == ["64 KiB"], result.stdout


@pytest.mark.launch
@pytest.mark.parametrize(("module", "name", "way"), [("mpicoll", "all_reduce", API), ("torch.distributed", "broadcast", BACKEND)])
def test_a_wrong_result_ends_the_job_and_names_the_way(module: str, name: str, way: str) -> None:
    result = launch(2, "-c", LAZY.format(module=module, name=name))
    assert result.returncode != 0
    assert f"{way}: wrong result on rank 1 of 2" in result.stderr


# --- without a launcher -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "nbytes"), [("8", 8), ("64KiB", 65536), ("4k", 4096), ("1M", 1 << 20), ("2 GiB", 2 << 30)])
def test_sizes_are_read_and_spelled(text: str, nbytes: int) -> None:
    assert formulas.parse(text) == nbytes
    assert formulas.parse(formulas.spell(nbytes)) == nbytes


def test_bandwidths_and_floors_are_those_of_the_definitions() -> None:
    row = Row("all_reduce", 1 << 20, 4, {API: [1e-3, 2e-3, 3e-3]})
    assert row.algorithm_bandwidth(API) == pytest.approx((1 << 20) / 2e-3)
    assert row.bus_bandwidth(API) == pytest.approx(1.5 * (1 << 20) / 2e-3)
    assert formulas.bus_factor("all_gather", 4) == 0.75
    assert formulas.bus_factor("broadcast", 4) == 1
    assert formulas.floor_bytes("all_reduce", 1 << 20, 4) == 1 << 20
    assert formulas.floor_bytes("reduce_scatter", 1 << 20, 4) == (1 << 20) * 5 // 8
    assert set(formulas.IN_PARTS) | set(formulas.REDUCTIONS) | {"broadcast", "barrier"} == set(COLLECTIVES)


def test_ratios_are_medians_of_the_rounds_ratios() -> None:
    """The ratio of the medians is another: here, 1."""
    row = Row("all_reduce", 8, 2, {API: [1.0, 2.0, 3.0], RAW: [2.0, 3.0, 1.0]})
    assert row.ratio(API, RAW) == pytest.approx(2 / 3)
    assert row.ratio(API, GLOO) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("count", [1, patterns.PERIOD, 3 * patterns.PERIOD + 5])
def test_patterns_notice_what_is_wrong(dtype: torch.dtype, count: int) -> None:
    x = torch.zeros(count, dtype=dtype)
    values = patterns.block(1, 3, dtype)
    patterns.fill(x, values)
    assert patterns.holds(x, values)
    assert torch.equal(x[:5], values[: min(5, count)])
    x[-1] = x[-1] == 0
    assert not patterns.holds(x, values)
    if count > 1:
        patterns.fill(x, values)
        assert not patterns.holds(x.roll(1024), values)
        assert not patterns.holds(x, patterns.block(0, 3, dtype))

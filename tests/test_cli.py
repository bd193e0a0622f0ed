"""The command ``mpicoll``: its commands, and that it imports no more than it needs."""

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpicoll
from mpicoll import __main__ as command
from mpicoll._base import config
from mpicoll._base.stdout import quiet_without_reader
from mpicoll._launch import run
from tests.support import clean_environment

pytestmark = pytest.mark.timeout(100)

SCRIPT = Path(sys.executable).parent / "mpicoll"


def start(*words: str, cwd: Path | None = None, timeout_s: float = 80) -> subprocess.CompletedProcess[str]:
    """`python -m mpicoll words...`."""
    command = [sys.executable, "-m", "mpicoll", *words]
    return subprocess.run(
        command, cwd=cwd, env=clean_environment(), capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
    )


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        assert command.main(words) == 0
        said = capsys.readouterr().out
        assert all(f"\n  {command} " in said for command in command.COMMANDS)
    assert command.main(["--version"]) == 0
    first, torch, mpi4py, mpi = capsys.readouterr().out.splitlines()
    assert (first, torch, mpi4py) == tuple(
        f"{name} {importlib.metadata.version(name)}" for name in ("mpicoll", "torch", "mpi4py")
    )
    assert re.fullmatch(r"(Open MPI|MPICH) [\d.]+ \(/.*libmpi.*\)", mpi), mpi


def test_version_without_an_mpi(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out.endswith("\nMPI: none that mpi4py can load; `mpicoll doctor` says why\n")


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["train"]) == 2
    assert "'train' is not a command; use one of run, doctor, bench, settings" in capsys.readouterr().err


def test_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["settings"]) == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"^{variable.name}\b", said, re.MULTILINE) for variable in config.VARIABLES)
    with pytest.raises(SystemExit, match="2"):
        command.main(["settings", "x"])
    assert "unrecognized arguments: x" in capsys.readouterr().err


@pytest.mark.ranks(1)  # bench prints on rank 0
@pytest.mark.parametrize("name", list(command.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert command.main([name, "--help"]) == 0
    assert f"usage: mpicoll {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "launcher", "bench"),
    [
        ([], [], []),
        (["all_reduce", "--sizes", "8"], [], ["all_reduce", "--sizes", "8"]),
        (["--quick"], [], ["--quick"]),
        (["-n", "3", "--bind-to=core", "latency"], ["-n", "3", "--bind-to=core"], ["latency"]),
        (["--quick", "latency", "--sizes", "8", "-n", "4"], ["-n", "4"], ["--quick", "latency", "--sizes", "8"]),
        (["--mpi", "mpich", "--quiet", "--quick"], ["--mpi", "mpich", "--quiet"], ["--quick"]),
    ],
)
def test_options_for_the_ranks_may_stand_anywhere(words: list[str], launcher: list[str], bench: list[str]) -> None:
    assert command.split_bench(words) == (launcher, bench)


def test_the_benchmark_runs_on_two_ranks_by_default() -> None:
    assert command.bench_command([], ["latency"]) == ["-n", "2", "-m", "mpicoll.bench", "latency"]
    assert command.bench_command(["-N", "3"], []) == ["-N", "3", "-m", "mpicoll.bench"]
    assert command.bench_command(["--quiet"], []) == ["--quiet", "-n", "2", "-m", "mpicoll.bench"]


def test_options_for_ranks_are_refused_where_none_are_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["bench", "-n", "2", "--help"]) == 2
    assert "-n 2" in capsys.readouterr().err


def test_a_broken_connection_is_an_error() -> None:
    @quiet_without_reader
    def main() -> int:
        raise BrokenPipeError("of a socket")

    with pytest.raises(BrokenPipeError, match="of a socket"):
        main()


def test_help_that_nobody_reads_is_no_error_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Python 3.11.2, whose argparse does not drop the error: "mpicoll.run: [Errno 32] Broken pipe"."""

    def parse(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(run, "parse", parse)
    with pytest.raises(BrokenPipeError):
        run.main(["--help"])


# --- really started ---


@pytest.mark.launch
@pytest.mark.parametrize("line", ["--help", "settings", "run --help", "bench --help", "doctor --help", "doctor"])
def test_a_reader_that_leaves_early(line: str) -> None:
    """``mpicoll doctor | head -1``. (It printed a traceback, or "Exception ignored ... BrokenPipeError".)"""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "mpicoll", *line.split()], env=clean_environment(), stdin=subprocess.DEVNULL,
            stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=80,
        )  # fmt: skip
    assert done.stderr == ""
    # As if SIGPIPE had ended it. argparse itself drops the error where its text is longer than Python's buffer.
    assert done.returncode in ((0, 141) if line.endswith(" --help") else (141,))


@pytest.mark.launch
def test_nothing_heavy_is_imported() -> None:
    code = "import sys, mpicoll.__main__ as cli\nfor words in (['--version'], ['--help'], ['settings']): cli.main(words)\n"
    code += "print([name for name in ('torch', 'mpi4py', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment(), timeout=60)
    assert done.stdout.endswith("\n[]\n"), done.stderr


@pytest.mark.launch
def test_the_script_is_the_module() -> None:
    if not SCRIPT.exists():
        pytest.skip("mpicoll is importable here, not installed")
    done = subprocess.run([str(SCRIPT), "--version"], capture_output=True, text=True, env=clean_environment(), timeout=60)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"mpicoll {mpicoll.__version__}")
    assert start("--version").stdout == done.stdout


@pytest.mark.launch
def test_run(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("from mpi4py import MPI\nimport sys\nif MPI.COMM_WORLD.rank == 1: print(sys.argv)\n")
    done = start("run", "-n", "2", "python", "job.py", "a", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['job.py', 'a']\n"), done.stderr
    assert start("run", "--help").stdout.startswith("usage: mpicoll run [options] script.py")
    done = start("run", "-n", "2", "nothing.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "nothing.py: no such file" in done.stderr


@pytest.mark.launch
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mpicoll ", {"run", "doctor", "bench", "settings"}),
        ("mpicoll run --max", {"--max-restarts "}),
        ("mpicoll bench --d", {"--dtypes", "--device"}),
        ("mpicoll bench --device ", {"cpu", "cuda"}),
        ("mpicoll doctor --j", {"--json "}),
    ],
)
def test_the_shell_completes(line: str, words: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    file = tmp_path / "words"
    asks = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(file)}
    command = [sys.executable, "-m", "mpicoll"]
    subprocess.run(command, env={**clean_environment(), **asks, "_ARGCOMPLETE_IFS": "\n"}, timeout=60, check=True)
    assert words <= set(file.read_text().split("\n"))


QUICK_BENCH = ("bench", "all_reduce", "--quick", "--sizes", "8", "--impl", "mpicoll")


@pytest.mark.launch
def test_bench() -> None:
    done = start(*QUICK_BENCH)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout, done.stdout
    done = start("bench", "nonsense")
    assert done.returncode == 2
    assert re.fullmatch(r"mpicoll bench: argument WHAT: invalid choice: 'nonsense' .*\n", done.stderr), done.stderr
    done = start("bench", "--quick", "barrier", "--ops", "SUM")
    assert (done.returncode, done.stderr) == (2, "mpicoll bench: barrier has no option --ops\n")
    assert "--sizes" in start("bench", "--help").stdout


@pytest.mark.launch
def test_bench_in_ranks_starts_none() -> None:
    done = start("run", "--quiet", "-n", "2", "-m", "mpicoll", *QUICK_BENCH)
    assert done.stdout.count("2 ranks") == 1, done.stderr

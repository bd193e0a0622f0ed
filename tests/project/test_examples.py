"""Every example runs by the command on its first line, and prints what docs/examples shows.

outcomes.py judges what they print. The scripts in scripts/ compare what they compute with one process.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.docs import programs
from tests.project import outcomes
from tests.support import ROOT, run

SURVIVES = ROOT / "examples" / "lost_rank.py"  # needs Open MPI 5: tests/faults/test_fault_tolerant.py
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path != SURVIVES)
TIME_LIMIT_S = 120  # seconds for one example; each takes a few, the rest is for a busy machine
ALL_PROOFS_LIMIT_S = 240  # seconds for the results of nine examples in one job
ON_GPUS = [path for path in EXAMPLES if path.stem.startswith("gpu_")]
PLOTTING = [path for path in EXAMPLES if '"--plot"' in path.read_text()]
COMPANIONS = {"hf_trainer", "lightning_mpi"}  # they need tests/companions/requirements.txt
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

# The limits of the examples: (file, ranks, what the refusal must say).
REFUSALS = [
    ("ping_pong.py", 1, "at least 2 ranks"),
    ("insitu_mpi4py.py", 1, "at least 2 ranks"),
    ("dlrm_all_to_all.py", 6, "6 ranks are too many for 5 tables"),
    pytest.param("digits_torch_ddp.py", 7, "7 ranks do not divide a batch of 120", marks=pytest.mark.slow),
    pytest.param("resnet_pipeline.py", 7, "too few for 7 ranks", marks=pytest.mark.slow),
]

# scripts/proofs.py compares these in one job.
PROVED = [
    "halo_convolution",
    "resnet_pipeline",
    "gpu_pipeline",
    "dlrm_all_to_all",
    "tensor_parallel",
    "ring_all_reduce",
    "gpu_ddp",
    "restart_training",
    "transformer_fsdp2",
]

names = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
runs = pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[pytest.mark.companion] * (path.stem in COMPANIONS)) for path in EXAMPLES]
)


def command_of(path: Path, ranks: int | None = None) -> list[str]:
    """The command on line 1 of the example, with this Python, and on ``ranks`` ranks instead of those it names."""
    words = shlex.split(programs.first_line(path))
    assert words[:4] == ["python", "-m", "mpicoll.run", "-n"], f"line 1 of {path.name} is no run command: {words}"
    return [sys.executable, *words[1:4], words[4] if ranks is None else str(ranks), *words[5:]]


def succeeded(path: Path, done: subprocess.CompletedProcess[str]) -> None:
    """The job ended well and the last line that the example printed begins with its name, as in "ping_pong: ..."."""
    said = f"{shlex.join(done.args)}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode == 0, said
    # Status 0 alone is no proof: an mpirun that lost a rank may still end with 0.
    results = [line for line in done.stdout.splitlines() if line.startswith(f"{path.stem}: ")]
    assert len(results) == 1, said
    assert "Traceback" not in done.stderr, said
    outcomes.check(path.stem, done.stdout, ranks=int(done.args[done.args.index("-n") + 1]))
    if path in ON_GPUS:
        assert done.stdout.count("no GPU here: on the CPU") == (0 if torch.cuda.is_available() else 1), said
        assert done.stdout.count("rank 0 on cuda:0, ") == (1 if torch.cuda.is_available() else 0), said


# DeepSpeed, which transformers and Lightning import where it is installed, logs to stdout.
NOT_OURS = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+\] \[WARNING\] \[real_accelerator\.py:.*\n", re.MULTILINE)
# One rank prints, or ranks that wait for each other: the lines come in the order of the page.
IN_ORDER = {
    "dlrm_all_to_all",
    "hf_trainer",
    "insitu_mpi4py",
    "lightning_mpi",
    "profile_step",
    "tensor_parallel",
    "transformer_fsdp2",
}
# Blocks of docs/examples with other options than those on the first line of an example.
FURTHER = {
    programs.name(console[0]): console
    for console in programs.CONSOLES
    if console[0].command.removeprefix("$ ") not in map(programs.first_line, programs.PROGRAMS)
}
KILLED = FURTHER.pop("restart_training")  # a test runs it with a proof
LEFT = {"slurm": ["finished", "step-10", "step-30"]}  # what they leave in the folder "checkpoints"


def looks_like_a_plot(picture: Path) -> None:
    content = picture.read_bytes()
    assert content.startswith(PNG_SIGNATURE)
    # The first chunk, IHDR, holds the size.
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (800, 500)
    assert len(content) > 20_000  # bytes; the axes without a curve have 17,000


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 12
    assert {path.stem for path in ON_GPUS} == {"gpu_ddp", "gpu_pipeline"}
    digits = {"digits_by_hand", "digits_ddp", "digits_torch_ddp"}
    assert {path.stem for path in PLOTTING} == {*digits, "halo_convolution", "insitu_mpi4py", "profile_step"}


@names
def test_first_line_is_the_run_command(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert re.fullmatch(rf"# python -m mpicoll\.run -n [1-9]\d* examples/{path.name}", first), first


@names
def test_fits_about_three_screens(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 160


def test_the_torch_script_knows_nothing_of_this_project() -> None:
    lines = (ROOT / "examples" / "digits_torch_ddp.py").read_text().splitlines()
    assert "mpicoll" not in "\n".join(lines[1:])  # line 1 is how it is launched here


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_ranks_of_a_node_take_its_gpus_in_turn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pretended GPUs: what the example does where there are any."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for local_rank in ("0", "1", "2", "3"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert example.own_device() == taken[-1]
    assert taken == [torch.device("cuda", index) for index in (0, 1, 0, 1)]


@pytest.mark.launch
@pytest.mark.timeout(TIME_LIMIT_S + 30)
@runs
def test_runs_by_its_first_line(path: Path) -> None:
    job = programs.shown(path)
    done = run(command_of(path), TIME_LIMIT_S)
    succeeded(path, done)
    if path.stem in COMPANIONS:
        done.stdout = NOT_OURS.sub("", done.stdout)
    if path not in ON_GPUS or not torch.cuda.is_available():  # the page shows them on the CPU
        programs.printed_as_shown(job, done, in_order=path.stem in IN_ORDER)


@pytest.mark.launch
@pytest.mark.timeout(2 * TIME_LIMIT_S + 30)
@pytest.mark.parametrize("name", FURTHER)
def test_further_commands_print_what_is_shown(name: str, tmp_path: Path) -> None:
    for job in FURTHER[name]:
        done = run(job.argv, TIME_LIMIT_S, cwd=tmp_path)
        programs.printed_as_shown(job, done)
        outcomes.check(name, done.stdout, ranks=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoints/*")) == LEFT.get(name, [])


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.timeout(TIME_LIMIT_S + 30)
@runs
def test_runs_on_three_ranks_and_draws_what_it_can(path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    plot = ["--plot", str(picture)] if path in PLOTTING else []
    succeeded(path, run([*command_of(path, ranks=3), *plot], TIME_LIMIT_S))
    if plot:
        looks_like_a_plot(picture)


def proved(ranks: int, script: str, *arguments: str, timeout_s: float = TIME_LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Runs a script that compares results of examples; it has succeeded."""
    command = [sys.executable, "-m", "mpicoll.run", "-n", str(ranks), f"tests/project/scripts/{script}.py"]
    done = run([*command, *arguments], timeout_s)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.launch
@pytest.mark.timeout(ALL_PROOFS_LIMIT_S + 30)
@pytest.mark.parametrize("ranks", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_they_compute_what_one_process_does(ranks: int) -> None:
    done = proved(ranks, "proofs", timeout_s=ALL_PROOFS_LIMIT_S)
    lines = [line for line in done.stdout.splitlines() if line.startswith(tuple(f"{name}: " for name in PROVED))]
    assert [line.partition(": ")[0] for line in lines] == PROVED, done.stdout


@pytest.mark.launch
@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_remote_calls_train_as_one_process_does() -> None:
    done = proved(3, "remote_proofs")
    for micro_batches in (1, 2):
        assert f"rpc_pipeline: gradients as in one process, {micro_batches} micro-batch(es)\n" in done.stdout, done.stdout
    assert "rpc_parameter_server: 4 parameters are trained\n" in done.stdout, done.stdout


@pytest.mark.launch
@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_digits_are_learnt_as_in_one_process() -> None:
    names = ("digits_by_hand", "digits_ddp", "digits_torch_ddp")
    done = proved(3, "digits_alone", *names)
    assert done.stdout.splitlines() == [f"{name}: 96 losses as in one process" for name in names]


@pytest.mark.launch
@pytest.mark.timeout(TIME_LIMIT_S + 30)
@pytest.mark.parametrize(("name", "ranks", "says"), REFUSALS)
def test_refuses_clearly_where_it_cannot_run(name: str, ranks: int, says: str) -> None:
    done = run(command_of(ROOT / "examples" / name, ranks), TIME_LIMIT_S)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if says in line and not line.startswith("mpicoll.run: rank ")]
    assert len(lines) == 1, done.stderr  # once, not once per rank; mpicoll.run says it again at the end
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.launch
@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_training_that_loses_ranks_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    job = programs.with_proof(KILLED[0], says="weights as of an undisturbed training")
    done = run(job.argv, TIME_LIMIT_S, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    programs.printed_as_shown(job, done)


@pytest.mark.launch
@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_the_transformer_in_bfloat16_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    done = proved(2, "proved", "transformer_fsdp2", "--bf16", "--checkpoint", str(folder))
    succeeded(ROOT / "examples" / "transformer_fsdp2.py", done)
    assert done.stdout.count("losses as without the checkpoint\n") == 1, done.stdout
    assert "2 ranks, torch.bfloat16\n" in done.stdout
    assert {file.name for file in folder.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert "training: 100%" in done.stderr
    assert done.stderr.count("training:   0%") == 3, "only rank 0 has a bar"


@pytest.mark.launch
@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_a_profiled_step_leaves_traces_and_a_picture(tmp_path: Path) -> None:
    path, picture = ROOT / "examples" / "profile_step.py", tmp_path / "step.png"
    done = run([*command_of(path, ranks=3), "--traces", str(tmp_path), "--plot", str(picture)], TIME_LIMIT_S)
    succeeded(path, done)
    looks_like_a_plot(picture)
    for rank in range(3):
        events = json.loads((tmp_path / f"rank-{rank}.json").read_text())["traceEvents"]
        names = [event.get("name") for event in events if event.get("ph") == "X"]
        assert [names.count(name) for name in ("step", "backward", "mpi:all_reduce")] == [5, 5, 15]


def test_both_programs_of_the_pipeline_name_the_same_command() -> None:
    folder = ROOT / "examples" / "rpc_pipeline"
    assert command_of(folder / "master.py") == command_of(folder / "worker.py")

"""Every example runs by the command on its first line, and prints what docs/examples shows.

outcomes.py judges what they print. The scripts in scripts/ compare what they compute with one process.
"""

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.docs import programs
from tests.docs.together import Done, Program, run_together
from tests.project import outcomes
from tests.project.scripts.example import imported
from tests.project.scripts.proofs import PROOFS
from tests.support import ROOT, run

SURVIVES = ROOT / "examples" / "lost_rank.py"  # needs Open MPI 5: tests/faults/test_fault_tolerant.py
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path != SURVIVES)
BASICS = sorted((ROOT / "examples" / "basics").glob("*.py"))
SPAWNS = ROOT / "examples" / "basics" / "spawn.py"  # starts its ranks itself
LONGEST = {"examples": 160, "basics": 40}  # lines: about three screens, and one
TIME_LIMIT_S = 120  # seconds for one example; each takes a few, the rest is for a busy machine
TOGETHER_LIMIT_S = 300  # seconds for all programs of one job
ON_GPUS = [path for path in EXAMPLES if path.stem.startswith("gpu_")]
PLOTTING = [path for path in EXAMPLES if '"--plot"' in path.read_text()]
COMPANIONS = {"hf_tensor_parallel", "hf_trainer", "lightning_mpi"}  # they need tests/companions/requirements.txt
SCRIPTS = "tests/project/scripts"

# The limits of the examples: (file, ranks, what the refusal must say).
REFUSALS = [
    ("ping_pong.py", 1, "at least 2 ranks"),
    ("insitu_mpi4py.py", 1, "at least 2 ranks"),
    ("weights_to_servers.py", 1, "at least 2 ranks"),
    ("dlrm_all_to_all.py", 6, "6 ranks are too many for 5 tables"),
    pytest.param("digits_torch_ddp.py", 7, "7 ranks do not divide a batch of 120", marks=pytest.mark.slow),
    pytest.param("resnet_pipeline.py", 7, "too few for 7 ranks", marks=pytest.mark.slow),
]

PROVED = list(PROOFS)
DIGITS = ["digits_by_hand", "digits_ddp", "digits_torch_ddp"]

# DeepSpeed, which transformers and Lightning import where it is installed, logs to stdout.
NOT_OURS = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+\] \[WARNING\] \[real_accelerator\.py:.*\n", re.MULTILINE)
# One rank prints, or ranks that wait for each other: the lines come in the order of the page.
IN_ORDER = {
    "dlrm_all_to_all", "hf_tensor_parallel", "hf_trainer", "insitu_mpi4py", "lightning_mpi", "profile_step", "six_collectives",
    "tensor_parallel", "transformer_fsdp2", "uneven_gather", "weights_to_servers",
}  # fmt: skip
# Blocks of docs/examples with other options than those on the first line of an example.
FURTHER = {
    programs.name(console[0]): console
    for console in programs.CONSOLES
    if console[0].command.removeprefix("$ ") not in map(programs.first_line, programs.PROGRAMS)
}
KILLED = FURTHER.pop("restart_training")  # a test runs it with a proof
LEFT = {"slurm": ["finished", "step-10", "step-30"]}  # what they leave in the folder "checkpoints"

each = partial(pytest.mark.parametrize, "path", ids=lambda path: path.stem)


def job_of_its_own(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that starts one or two jobs."""
    return pytest.mark.launch(pytest.mark.timeout(2 * TIME_LIMIT_S + 30)(test))


def ranks_of(path: Path) -> int | None:
    """The number of ranks on line 1 of an example; None for one that starts its ranks itself."""
    found = re.search(r" -n (\d)", programs.first_line(path))
    return found and int(found[1])


def command_of(path: Path, ranks: int | None = None) -> list[str]:
    """The command on line 1 of the example, with this Python, and on ``ranks`` ranks instead of those it names."""
    line = programs.first_line(path)
    return [sys.executable, *shlex.split(line if ranks is None else re.sub(r" -n \d", f" -n {ranks}", line, count=1))[1:]]


def succeeded(path: Path, done: Done) -> None:
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


def printed_its_page(path: Path, done: Done) -> None:
    """The example has printed what its page shows. Pages show the CPU; the devices of basic examples are put in."""
    job = programs.shown(path)
    if path in EXAMPLES:
        succeeded(path, done)
    elif torch.cuda.is_available():
        count = torch.cuda.device_count()
        device = partial(re.sub, r"^rank (\d)(.*) on cpu$", lambda m: f"rank {m[1]}{m[2]} on cuda:{int(m[1]) % count}")
        job = dataclasses.replace(job, shown=list(map(device, job.shown)))
    assert "Traceback" not in done.stderr, done.stderr
    if path not in ON_GPUS or not torch.cuda.is_available():
        programs.printed_as_shown(job, done, in_order=path.stem in IN_ORDER)


def looks_like_a_plot(picture: Path) -> None:
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 20_000  # bytes; the axes without a curve have 17,000


@each([*EXAMPLES, *BASICS])
def test_an_example_is_short_and_its_first_line_is_its_command(path: Path) -> None:
    first, *rest = path.read_text().splitlines()
    launcher = r"(-m mpicoll\.run -n [1-9]\d* )" + "?" * (path in BASICS)
    assert re.fullmatch(rf"# python {launcher}{path.relative_to(ROOT)}", first), first
    assert 1 + len(rest) <= LONGEST[path.parent.name]


@each(ON_GPUS)
def test_ranks_of_a_node_take_its_gpus_in_turn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pretended GPUs: what the example does where there are any."""
    example = imported(path.stem)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for local_rank in ("0", "1", "2", "3"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert example.own_device() == taken[-1]
    assert taken == [torch.device("cuda", index) for index in (0, 1, 0, 1)]


def all_are_proved(done: Done) -> None:
    lines = [line for line in done.stdout.splitlines() if line.startswith(tuple(f"{name}: " for name in PROVED))]
    assert done.returncode == 0, done.stderr
    assert [line.partition(": ")[0] for line in lines] == PROVED, done.stdout
    assert lines[-3:] == [f"{name}: 96 losses as in one process" for name in DIGITS]


def remote_calls_train_as_one_process_does(done: Done) -> None:
    assert done.returncode == 0, done.stderr
    for micro_batches in (1, 2):
        assert f"rpc_pipeline: gradients as in one process, {micro_batches} micro-batch(es)\n" in done.stdout, done.stdout
    assert "rpc_parameter_server: 4 parameters are trained\n" in done.stdout, done.stdout


def a_profiled_step_leaves_traces_and_a_picture(folder: Path, done: Done) -> None:
    succeeded(ROOT / "examples" / "profile_step.py", done)
    looks_like_a_plot(folder / "step.png")
    for rank in range(3):
        events = json.loads((folder / f"rank-{rank}.json").read_text())["traceEvents"]
        names = [event.get("name") for event in events if event.get("ph") == "X"]
        assert [names.count(name) for name in ("step", "backward", "mpi:all_reduce")] == [5, 5, 15]


def proofs(ranks: int, folder: Path) -> list[tuple[Sequence[str], Callable[[Done], object]]]:
    """Programs that compare what the examples compute with one process, and what each of them must print."""
    traces = ["examples/profile_step.py", "--traces", str(folder), "--plot", str(folder / "step.png")]
    return {
        3: [
            ([f"{SCRIPTS}/remote_proofs.py"], remote_calls_train_as_one_process_does),
            (traces, partial(a_profiled_step_leaves_traces_and_a_picture, folder)),
        ],
        4: [([f"{SCRIPTS}/proofs.py"], all_are_proved)],
    }.get(ranks, [])


@pytest.mark.launch
@pytest.mark.timeout(3 * TOGETHER_LIMIT_S)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_examples_print_what_their_pages_show_and_compute_what_one_process_does(ranks: int, tmp_path: Path) -> None:
    """Those whose first line has this number of ranks, one after the other in one job."""
    paths = [path for path in [*EXAMPLES, *BASICS] if ranks_of(path) == ranks and path.stem not in COMPANIONS]
    shown = [Program([str(path.relative_to(ROOT))], ROOT, partial(printed_its_page, path)) for path in paths]
    proved = [Program(list(words), ROOT, check) for words, check in proofs(ranks, tmp_path)]
    run_together(ranks, [*shown, *proved], tmp_path, TOGETHER_LIMIT_S)


@job_of_its_own
@each([SPAWNS, *(pytest.param(path, marks=pytest.mark.companion) for path in EXAMPLES if path.stem in COMPANIONS)])
def test_runs_by_its_first_line(path: Path) -> None:
    done = run(command_of(path), TIME_LIMIT_S)
    done.stdout = NOT_OURS.sub("", done.stdout)
    printed_its_page(path, done)


@job_of_its_own
@pytest.mark.parametrize("name", FURTHER)
def test_further_commands_print_what_is_shown(name: str, tmp_path: Path) -> None:
    for job in FURTHER[name]:
        done = run(job.argv, TIME_LIMIT_S, cwd=tmp_path)
        programs.printed_as_shown(job, done)
        outcomes.check(name, done.stdout, ranks=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoints/*")) == LEFT.get(name, [])


@pytest.mark.slow
@job_of_its_own
@each([pytest.param(path, marks=[pytest.mark.companion] * (path.stem in COMPANIONS)) for path in EXAMPLES])
def test_runs_on_three_ranks_and_draws_what_it_can(path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    plot = ["--plot", str(picture)] if path in PLOTTING else []
    succeeded(path, run([*command_of(path, ranks=3), *plot], TIME_LIMIT_S))
    if plot:
        looks_like_a_plot(picture)


@pytest.mark.companion
@job_of_its_own
def test_tensor_parallel_inference_runs_over_gloo_too() -> None:
    path = ROOT / "examples" / "hf_tensor_parallel.py"
    done = run([*command_of(path), "--backend", "gloo"], TIME_LIMIT_S)
    succeeded(path, done)
    assert "\nbackend gloo: " in done.stdout


@pytest.mark.slow
@job_of_its_own
def test_three_ranks_compute_what_one_process_does() -> None:
    all_are_proved(run([sys.executable, "-m", "mpicoll.run", "-n", "3", f"{SCRIPTS}/proofs.py"], 2 * TIME_LIMIT_S))


@job_of_its_own
@pytest.mark.parametrize(("name", "ranks", "says"), REFUSALS)
def test_refuses_clearly_where_it_cannot_run(name: str, ranks: int, says: str) -> None:
    done = run(command_of(ROOT / "examples" / name, ranks), TIME_LIMIT_S)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if says in line and not line.startswith("mpicoll.run: rank ")]
    assert len(lines) == 1, done.stderr  # once, not once per rank; mpicoll.run says it again at the end
    assert "Traceback" not in done.stderr, done.stderr


@job_of_its_own
def test_training_that_loses_ranks_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    job = programs.with_proof(KILLED[0], says="weights as of an undisturbed training")
    done = run(job.argv, TIME_LIMIT_S, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    programs.printed_as_shown(job, done)


@pytest.mark.slow
@job_of_its_own
def test_the_transformer_in_bfloat16_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    folder, job = tmp_path / "checkpoint", [sys.executable, "-m", "mpicoll.run", "-n", "2", f"{SCRIPTS}/proved.py"]
    done = run([*job, "transformer_fsdp2", "--bf16", "--checkpoint", str(folder)], TIME_LIMIT_S)
    succeeded(ROOT / "examples" / "transformer_fsdp2.py", done)
    assert done.stdout.count("losses as without the checkpoint\n") == 1, done.stdout
    assert "2 ranks, torch.bfloat16\n" in done.stdout
    assert {file.name for file in folder.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert "training: 100%" in done.stderr
    assert done.stderr.count("training:   0%") == 3, "only rank 0 has a bar"

"""The options of mpicoll.run, each as users of torchrun, Open MPI's mpirun and MPICH's mpiexec type them; pure."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import mpicoll
from mpicoll._launch import arguments
from mpicoll._launch.arguments import ACCEPTED, FLAGS, REPLACED, sets_ranks
from mpicoll._launch.find.hostfile import Host
from mpicoll._launch.job import Request
from mpicoll.errors import LaunchError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("t.py").touch()
    Path("hosts").write_text("a slots=2\nb slots=2\n")
    return tmp_path


RANK = (arguments.python(), "-u", "-m", "mpicoll._launch.rank")


def parse(line: str) -> tuple[Request, tuple[str, ...]]:
    """The options, and the program's words behind those by which a rank is started."""
    options, (program,) = arguments.parse(shlex.split(line))
    assert program.command[: len(RANK)] == RANK
    return options, program.command[len(RANK) :]


# --- a leading python ---


@pytest.mark.parametrize(
    ("line", "flags", "command"),
    [
        *[(f"{python} t.py --lr 1 -n 7", (), ("t.py", "--lr", "1", "-n", "7")) for python in ("python3.11", sys.executable)],
        ("python -u t.py", (), ("t.py",)),
        ("python -W error -X dev -Bs t.py a", ("-W", "error", "-X", "dev", "-Bs"), ("t.py", "a")),
        ("python -Wignore -m xml.train -m x", ("-Wignore",), ("-m", "xml.train", "-m", "x")),
        ("python -O -c 'print(1)' -c x", ("-O",), ("-c", "print(1)", "-c", "x")),
        ("python3 -OO t.py", ("-OO",), ("t.py",)),
    ],
)  # fmt: skip
def test_a_leading_python_is_dropped_and_its_options_are_kept(
    line: str, flags: tuple[str, ...], command: tuple[str, ...]
) -> None:
    _, (program,) = arguments.parse(shlex.split(f"-n 2 {line}"))
    assert program.command == (*RANK[:2], *flags, *RANK[2:], *command)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/other/bin/python t.py", "starts programs with its own Python.*leave /other/bin/python out"),
        ("python", "a script or a module is missing"),
        ("python -i t.py", "only a script, a module or -c"),
        ("..", r"\.\.: a folder without a __main__\.py"),
        ("python nothing.py", "nothing.py: no such file"),
        ("nothing.py", "nothing.py: no such file in .*--no-python"),
        ("--no-python ./no-such-program", "no such program"),
    ],
)
def test_a_program_that_cannot_be_started_says_why(line: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        parse(f"-n 2 {line}")


@pytest.mark.parametrize("words", ["-p no:cacheprovider", "-h", "--version", "-x", "-r a", "--np", "-k a --host", "-- -n 3"])
def test_the_program_has_its_arguments_whatever_they_are(words: str) -> None:
    """``-m pytest -p ...`` was refused: argparse took it for an abbreviation of one of ours."""
    for program_words in ("-m pytest", "t.py", "python t.py"):
        _, program = parse(f"-n 2 {program_words} {words}")
        expected = ("-m", "pytest") if program_words.startswith("-m") else ("t.py",)
        assert program == (*expected, *shlex.split(words))


def test_no_python_keeps_python() -> None:
    _, program = parse("-n 2 --no-python python t.py")
    assert program == ("--exec", "python", "t.py")


def test_several_programs() -> None:
    request, programs = arguments.parse(shlex.split("--host b -n 1 t.py a : -n 2 -m mod -n 3 -- t.py"))
    assert [(p.command[len(RANK) :], p.ranks) for p in programs] == [
        (("t.py", "a"), 1), (("-m", "mod", "-n", "3", "--", "t.py"), 2)
    ]  # fmt: skip
    assert request.hosts == (Host("b", None),)


# --- ranks and hosts ---

SPELLINGS = {
    "-n 3 | -n3 | -np 3 | --nproc 3 | --nproc=3": (3, Request()),
    "--nproc-per-node 2 | --nproc_per_node=2 | -N 2": (None, Request(per_node=2)),
    "-H a:2,b | -Ha:2,b | --host a:2,b | --host=a:2,b": (None, Request(hosts=(Host("a", 2), Host("b", None)))),
    "--hostfile hosts | --hostfile=hosts": (None, Request(hosts=(Host("a", 2), Host("b", 2)))),
}


@pytest.mark.parametrize(
    ("spelling", "known"), [(spelling, known) for spellings, known in SPELLINGS.items() for spelling in spellings.split(" | ")]
)
def test_the_number_of_ranks_and_their_hosts(spelling: str, known: tuple[int | None, Request]) -> None:
    options, (program,) = arguments.parse([*spelling.split(), "t.py"])
    assert (program.ranks, options) == known


def test_the_number_of_nodes() -> None:
    assert [parse(f"{spelling} t.py")[0].nodes for spelling in ("--nnodes 2", "--nnodes=2:2")] == [2, 2]


def test_ranks_on_each_node_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "usable_cores", lambda: 6)
    monkeypatch.setattr(arguments, "count_gpus", lambda: 0)
    options, _ = parse("--nproc-per-node cpu t.py")
    assert options.per_node == 6
    assert options.notes == ("--nproc-per-node cpu: 6, one rank for each usable core of this node",)
    assert parse("--nproc-per-node auto t.py")[0].per_node == 6
    with pytest.raises(LaunchError, match="torch sees no GPU on this node; use cpu, auto or a number"):
        parse("--nproc-per-node gpu t.py")
    monkeypatch.setattr(arguments, "count_gpus", lambda: 4)
    for word in ("gpu", "auto"):
        assert parse(f"--nproc_per_node={word} t.py")[0].per_node == 4


# --- torchrun ---


def test_a_line_of_torchrun() -> None:
    options, program = parse(
        "--standalone --nnodes=1 --nproc_per_node=4 --rdzv_backend=c10d --rdzv-endpoint localhost:0 --rdzv_id 7 --max_restarts 3"
        " --node_rank=0 --master_addr=node1 --master_port 29511 t.py --epochs 3"
    )
    assert program == ("t.py", "--epochs", "3")
    assert options.per_node == 4
    assert options.exported == ("MASTER_ADDR=node1", "MASTER_PORT=29511")
    assert options.notes == (
        "--standalone, --rdzv-backend, --rdzv-endpoint, --rdzv-id: without effect, MPI brings the ranks together",
    )
    assert options.max_restarts == 3


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_needs_no_counterpart_is_accepted(name: str) -> None:
    for spelling in {name, "--" + name[2:].replace("-", "_")}:
        options, program = parse(f"{spelling} {'' if name in FLAGS else '3 '}t.py")
        assert program == ("t.py",)
        assert options.notes == (f"{name}: without effect, {ACCEPTED[name]}",)


@pytest.mark.parametrize("name", REPLACED)
def test_what_has_another_form_here_is_refused_with_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(f"{name}=3 t.py" if name.startswith("--") else f"{name} 3 t.py")
    assert ended.value.code == 2
    assert REPLACED[name] in capsys.readouterr().err


# --- mpirun and mpiexec ---


def test_binding_output_and_environment() -> None:
    for line in ("--bind-to core --map-by numa --tag-output", "--bind_to=core --map-by=numa --tag_output"):
        assert parse(f"{line} t.py")[0] == Request(bind_to="core", map_by="numa", tag_output=True)
    options, _ = parse("-x A -x B=1 --mpiexec-args '--mca btl tcp,self' t.py")
    assert options == Request(exported=("A", "B=1"), mpiexec_args=("--mca", "btl", "tcp,self"))


def test_log_files(here: Path) -> None:
    options, program = parse("--log-dir logs --tag-output t.py")
    assert program == ("--log-dir", f"{here}/logs", "t.py")
    assert options == Request(notes=options.notes)  # nothing is left to tag
    assert options.notes[0].startswith(f"the output of rank R goes to {here}/logs/rank-R.log; --tag-output marks")
    assert parse("--log_dir /x --no-python true a")[1] == ("--log-dir", "/x", "--exec", "true", "a")


# --- refused ---


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--bind-too core t.py", "--bind-too is not an option of mpicoll.run; did you mean --bind-to?"),
        ("", "no program"),
        ("-n 0 t.py", "'0' is not a number of ranks"),
        ("-n 2 --host a --hostfile b t.py", "not allowed with"),
        ("-n 2 -m", "-m needs the name of a module"),
        ("-n 2 -c", "-c needs the text of a program"),
        ("-c 2 t.py", "use -n 2 for a number of ranks"),
        ("-n 2 true : ", "a program is missing"),
        ("-n 1 t.py : -n 1 --mpi mpich t.py", "--mpi holds for the whole job"),
        ("--bindto core t.py", "did you mean --bind-to?"),
        ("--nprocs 2 t.py", "did you mean --nproc?"),
        ("--nproc_per_nod 2 t.py", "did you mean --nproc-per-node?"),
        ("-nolocal t.py", "-nolocal is not an option of mpicoll.run"),
        ("--display map t.py", "An option of mpiexec goes into --mpiexec-args '--display ...'"),
        ("--nproc-per-node two t.py", "use 1 or more, or gpu, cpu, auto"),
        ("--nnodes 1:4 t.py", "an MPI job cannot grow or shrink; give one number"),
        ("--nnodes 0 t.py", "'0' is not a number of nodes"),
        ("--node-rank 1 t.py", "started once for all nodes.*--host or --hostfile"),
        ("--master-port 0 t.py", "'0' is not a port"),
        ("-n 1 t.py : -n 1 --bind-to core t.py", "--bind-to holds for the whole job: give it before the first program"),
        ("-n 1 t.py : -n 1 --host a t.py", "--host holds for the whole job|-H holds for the whole job"),
        ("-n 1 t.py : t.py a", "t.py a: say how many ranks of it to start, with -n N before it"),
        ("--mca btl tcp t.py", r"--mca is not an option of mpicoll.run\. An option of mpiexec goes into --mpiexec-args '--mca"),
        ("-n 1 t.py : -n 1 --master_port 1 t.py", "--master-port holds for the whole job"),
    ],
)
def test_what_is_refused_and_the_remedy(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.parse(shlex.split(line))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert re.search(words, said), said
    assert said.count("\n") == 1


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("--version", "--help"):
        with pytest.raises(SystemExit) as ended:
            parse(line)
        assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"mpicoll {mpicoll.__version__}\n")
    assert "--nproc-per-node" in said
    assert "--nproc_per_node" not in said  # accepted, and not shown
    assert "exit status" in said


# --- where the options end ---


def test_whether_options_set_the_number_of_ranks() -> None:
    assert sets_ranks(["--bind-to", "core", "-n", "4"])
    assert sets_ranks(["--nproc-per-node=2"])
    assert sets_ranks(["--hostfile", "hosts"])
    assert not sets_ranks(["--bind-to", "core", "--quiet"])

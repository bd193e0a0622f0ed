"""Host lists in either syntax, and the samples in hostfiles/: each is parsed, and makes the command it promises."""

import re
import shlex

import pytest

import mpicoll._launch.find.hostfile as hostfile
from mpicoll._launch import arguments
from mpicoll._launch.find.hostfile import Host
from mpicoll._launch.job import Program, Request
from mpicoll._launch.plan import plan
from tests.launch.made_up import MPICH, OPENMPI, a_site
from tests.support import ROOT

SAMPLES = ROOT / "hostfiles"


def words(line: str) -> tuple[Request, list[Program]]:
    """The sample's command line as mpicoll.run reads it; its scripts need not exist here."""
    return arguments.parse([word.replace("hostfiles/", f"{SAMPLES}/") for word in shlex.split(line)[3:]])


@pytest.mark.parametrize("name", ["openmpi.txt", "mpich.txt"])
def test_both_syntaxes_mean_the_same(name: str) -> None:
    assert hostfile.read(str(SAMPLES / name)) == (Host("node01", 4), Host("node02", 4))


def test_the_slurm_script_runs_on_its_allocation() -> None:
    text = (SAMPLES / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    line = next(line for line in text.splitlines() if line.startswith("python -m mpicoll.run"))
    words = ["--no-python", "true", *shlex.split(line)[4:]]  # a program that exists; the options are none
    _, programs = arguments.parse(words)
    ranks = int(options["nodes"]) * int(options["ntasks-per-node"])
    allocation = a_site(
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="node[01-02]",
        SLURM_TASKS_PER_NODE=f"{options['ntasks-per-node']}(x{options['nodes']})",
        SLURM_NTASKS=str(ranks),
    )
    for mpi in (OPENMPI, MPICH):
        made = plan(programs, *mpi, allocation)
        assert f"-n {ranks}" in " ".join(made.command)
        assert made.added["MASTER_ADDR"] == "node01"
        assert ("SLURM_MPI_TYPE" in made.added) == (mpi is MPICH)


def test_the_two_node_sample_is_one_world_of_five() -> None:
    text = (SAMPLES / "two_nodes_mpmd.sh").read_text()
    line = next(line for line in text.splitlines() if line.startswith("python -m mpicoll.run"))
    request, programs = words(line)
    joined = " ".join(plan(programs, *OPENMPI, a_site(), request).command)
    assert re.search(r"-n 1 --host node01:1 .*server\.py : -n 4 --host node02:4 .*worker\.py --batch-size 32$", joined)
    mpich = " ".join(plan(programs, *MPICH, a_site(), request).command)
    assert re.search(r"-hosts node01:1,node02:4 .*-n 1 .*server\.py : -n 4 .*worker\.py --batch-size 32$", mpich)


# --- the parser ---


def test_comments_blank_lines_and_both_syntaxes_in_one_file() -> None:
    text = "# all of them\n\na slots=2 # fast\nb:3\nc\nd max-slots=4\n e.example.org   slots=1 max_slots=2\n"
    expected = (Host("a", 2), Host("b", 3), Host("c", None), Host("d", 4), Host("e.example.org", 1))
    assert hostfile.parse(text) == expected


def test_a_host_that_comes_again_adds_up() -> None:
    assert hostfile.parse("a\nb\na\na\n") == (Host("a", 3), Host("b", None))  # one line a rank, as PBS writes
    assert hostfile.parse("a:2\nb:1\na:2\n") == (Host("a", 4), Host("b", 1))
    assert hostfile.parse_list("a,b:2,a") == (Host("a", 2), Host("b", 2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("# nothing\n", "names no host"),
        ("a slots=two", "line 1: 'slots=two'"),
        ("a\nb user=me", r"line 2: 'user=me' is not understood.*~/\.ssh/config"),
        ("a:b", "'a:b' is no host"),
        ("a slots=0", "host a has 0 slots"),
        ("-n 4", "'-n' is no host"),
    ],
)
def test_a_bad_line_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hostfile.parse(text, "hosts.txt")

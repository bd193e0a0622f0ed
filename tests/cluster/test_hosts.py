"""`mpicoll run` and `mpicoll doctor` on hosts of network namespaces, which are reached by ssh (tests/support/hosts.py)."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import where
from tests.support import LAUNCH_ENVIRONMENT, ROOT, hosts, is_open_mpi, mpiexec, run

REASON = hosts.missing()
pytestmark = [
    pytest.mark.launch,
    pytest.mark.timeout(150),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Hosts]:
    with hosts.hosts(4, tmp_path_factory.mktemp("hosts")) as up:
        yield up


def hostfile(folder: Path, *lines: str) -> str:
    (folder / "nodes").write_text("\n".join(lines))
    return str(folder / "nodes")  # "hosts" is the /etc/hosts of the machines


def doctor(machines: hosts.Hosts, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*machines.enter(0), sys.executable, "-m", "mpicoll.doctor", *words]
    return run(command, timeout_s=100, env=machines.environment())


def findings(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["topic"]: finding for finding in report["findings"]}


def test_one_rank_on_each_of_four_hosts(machines: hosts.Hosts) -> None:
    done = machines.launch("--quiet", "--hostfile", str(machines.hostfile(1)), where.SCRIPT, timeout_s=60)
    assert where.check(done, "mpihost1") == machines.names


def test_the_first_host_is_another_one(machines: hosts.Hosts) -> None:
    done = machines.launch("--quiet", "--host", "mpihost3:2,mpihost2:1", where.SCRIPT, timeout_s=60)
    assert where.check(done, "mpihost3") == ["mpihost3", "mpihost3", "mpihost2"]


def test_mpiexec_without_mpicoll_run(machines: hosts.Hosts) -> None:
    """The settings are those that root and more ranks than cores need."""
    environ = {**LAUNCH_ENVIRONMENT, **machines.environment()}
    names = ["--host" if is_open_mpi() else "-hosts", "mpihost1:2,mpihost2:1"]
    passed = ["-x", "PYTHONPATH"] if is_open_mpi() else []
    command = [*machines.enter(0), mpiexec(), *names, *passed, "-n", "3", sys.executable, where.SCRIPT]
    done = run(command, timeout_s=60, env=environ)
    assert where.check(done, "mpihost1", by_mpi=True) == ["mpihost1"] * 2 + ["mpihost2"]


def test_crowded_hosts_all_get_ranks(machines: hosts.Hosts) -> None:
    """(With more ranks than cores or slots, Open MPI 5 started all of them on the first host.)"""
    done = machines.launch("--quiet", "--host", "mpihost1:2,mpihost2:2", where.SCRIPT, timeout_s=60)
    assert where.check(done, "mpihost1") == ["mpihost1"] * 2 + ["mpihost2"] * 2


@pytest.mark.parametrize("script", ["train.pbs", "train.lsf"])
def test_the_scripts_of_other_schedulers(script: str, machines: hosts.Hosts, tmp_path: Path) -> None:
    """examples/clusters, with what PBS and LSF tell a job, which nobody has submitted: here is neither."""
    shutil.copy(where.SCRIPT, tmp_path / "train.py")
    file = hostfile(tmp_path, "mpihost2", "mpihost2", "mpihost3", "mpihost3", "")  # a line for each rank
    scheduler = {
        "train.pbs": {"PBS_JOBID": "7.server", "PBS_NODEFILE": file, "PBS_O_WORKDIR": str(tmp_path)},
        "train.lsf": {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": file, "LSB_MCPU_HOSTS": "mpihost2 2 mpihost3 2"},
    }[script]
    environ = {**machines.environment(), **scheduler, "PATH": f"{Path(sys.executable).parent}:{hosts.PATH}"}
    done = run([*machines.enter(1, tmp_path), "bash", str(ROOT / "examples" / "clusters" / script)], timeout_s=60, env=environ)
    assert where.check(done, "mpihost2") == ["mpihost2"] * 2 + ["mpihost3"] * 2


def test_the_doctor_tries_all_hosts(machines: hosts.Hosts, tmp_path: Path) -> None:
    file = hostfile(tmp_path, "mpihost2 slots=4", "mpihost3:2", "mpihost4")
    done = doctor(machines, "--json", "--run", "--hostfile", file)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["facts"]["trial_on_hosts"]["ran_on"] == ["mpihost2", "mpihost3", "mpihost4"]
    text = findings(report)["trial on hosts"]["text"]
    assert text.startswith("one rank on each of 3 hosts (mpihost2, mpihost3, mpihost4): all_reduce is right; 8 bytes in ")
    assert ", 16 MiB in " in text


@pytest.mark.timeout(250)
def test_the_doctor_names_the_host_that_it_cannot_reach(tmp_path: Path) -> None:
    with hosts.hosts(2, tmp_path) as machines:
        machines.cut(1)
        done = doctor(machines, "--run", "--hostfile", hostfile(tmp_path, "mpihost1", "mpihost2"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL  trial on hosts: 1 of the 2 hosts of" in done.stdout
    assert "starts no rank: mpihost2\n      mpihost2: ssh: connect to host mpihost2 port 22: " in done.stdout, done.stdout
    assert "`ssh mpihost2 true`" in done.stdout


def test_the_doctor_names_a_file_that_it_cannot_read(machines: hosts.Hosts, tmp_path: Path) -> None:
    done = doctor(machines, "--run", "--hostfile", hostfile(tmp_path, "# no host"))
    assert done.returncode == 1
    assert "FAIL  trial on hosts: cannot read the hosts: " in done.stdout
    assert "names no host" in done.stdout
    assert "add --run" in doctor(machines, "--hostfile", "hosts").stderr

"""The doctor: each check on made-up facts, and the real report on this machine, alone and as a job."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpicoll._launch.doctor.checks as doctor
from mpicoll._base.launcher import Launch
from mpicoll._launch.doctor.report import Finding
from mpicoll._launch.find import installations
from mpicoll._launch.find.installations import Mpi
from tests.support import run

OPENMPI = Mpi("Open MPI", (5, 0, 11), "/o/lib/libmpi.so.40")
MPICH = Mpi("MPICH", (5, 0, 2), "/m/lib/libmpi.so.12")
TORCH: dict[str, Any] = {
    "version": "2.13.0+cpu", "cuda": None, "hip": None, "threads": 2, "built_with_mpi": False, "entry_point": True,
    "accelerator": None, "accelerators": 0,
}  # fmt: skip
JOB: dict[str, Any] = {
    "vendor": "Open MPI", "size": 3, "rank": 0, "hosts": ["a", "a", "b"], "shared_memory_size": 2,
}  # fmt: skip


def mpi_at(level: str) -> dict[str, str]:
    return {"thread_level": level, "mpi4py_version": "4", "mpi4py_file": "f", "library_version": "v"}


def launched(launcher: str, size: int, local_size: int) -> Launch:
    return Launch(launcher, 0, size, 0, local_size)


ALONE = "rank 0 of 4, but MPI says rank 0 of 1"
SINGLETONS = {**JOB, "size": 1, "hosts": ["a"]}  # N of them: traps 76, 79
APART = {**JOB, "shared_memory_size": 1}  # containers that do not share memory: trap 78


@pytest.mark.parametrize(
    ("check", "facts", "states", "text", "remedy"),
    [
        # the adapter follows from torch's version
        (doctor.check_torch, [{**TORCH, "version": "2.13.0+cpu"}], ["ok"], "subclass of ProcessGroup", ""),
        (doctor.check_torch, [{**TORCH, "version": "2.14.1"}], ["ok"], "subclass of Backend", ""),
        (doctor.check_torch, [{**TORCH, "version": "2.15.0a0+git1"}], ["ok"], "subclass of Backend", ""),
        (doctor.check_torch, [{"error": "ModuleNotFoundError: No module named 'torch'"}], ["fail"], "", "pip install"),
        (doctor.check_torch, [{**TORCH, "version": "2.9.1"}], ["fail"], "", "pip install"),
        (doctor.check_torch, [{**TORCH, "built_with_mpi": True}], ["ok", "note"], "", "MPICOLL_OVERRIDE_MPI=1"),
        (doctor.check_torch, [{**TORCH, "entry_point": False}], ["ok", "note"], "", "pip install"),
        # the thread level: trap 55
        (doctor.check_mpi, [OPENMPI, mpi_at("MULTIPLE")], ["ok", "ok"], "", ""),
        (doctor.check_mpi, [OPENMPI, mpi_at("SERIALIZED")], ["ok", "ok"], "", ""),
        (doctor.check_mpi, [OPENMPI, mpi_at("FUNNELED")], ["ok", "fail"], "", ""),
        (doctor.check_mpi, [OPENMPI, mpi_at("SINGLE")], ["ok", "fail"], "", ""),
        (doctor.check_mpi, [OPENMPI, {"error": "MPI did not answer within 1 s"}], ["fail"], "MPI did not answer", ""),
        (doctor.check_job, [launched("hydra", 4, 4), SINGLETONS], ["fail"], ALONE, "mpicoll.run"),
        (doctor.check_job, [launched("slurm", 4, 4), SINGLETONS], ["fail"], ALONE, "--mpi=pmix"),
        (doctor.check_job, [launched("openmpi", 3, 2), APART], ["ok", "note"], "", "--ipc=host"),
        (doctor.check_shared_memory, ["/no/such/folder"], ["fail"], "", ""),
    ],
)
def test_a_check(check: Callable[..., list[Finding]], facts: list[Any], states: list[str], text: str, remedy: str) -> None:
    """text, and the pattern remedy: of the last finding."""
    findings = check(*facts)
    assert [finding.state for finding in findings] == states
    assert text in findings[-1].text
    assert re.search(remedy, findings[-1].remedy)


def test_a_hanging_or_dying_mpi_takes_nobody_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "probe.py"
    monkeypatch.setattr(installations, "PROBE", script)
    script.write_text("import time; time.sleep(60)")
    with monkeypatch.context() as short:
        short.setenv("MPICOLL_PROBE_TIMEOUT", "0.5")
        assert "did not answer within 0.5 s" in installations.probe("start", os.environ)["error"]
    script.write_text("import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()")
    report = installations.probe("start", os.environ)
    assert "status -6" in report["error"]
    assert "last words" in report["error"]


def test_the_ranks_of_each_host() -> None:
    (finding,) = doctor.check_job(launched("openmpi", 3, 2), JOB)
    assert finding.text.startswith("3 ranks on 2 hosts")
    assert finding.evidence == ("a: ranks 0-1", "b: rank 2")


# --- the machine ---


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(free: int) -> Finding:
        blocks = free // 4096
        status = os.statvfs_result((4096, 4096, 2 * blocks, blocks, blocks, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: status)
        (finding,) = doctor.check_shared_memory("/dev/shm")
        return finding

    assert checked(8 * 2**30) == Finding("ok", "shared memory", "/dev/shm: 16.0 GiB, 8.0 GiB free")
    assert checked(512 * 2**20).state == "note"
    assert checked(16 * 2**20).state == "fail"
    assert "--shm-size" in checked(16 * 2**20).remedy


# --- the real thing ---


def start(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", *words], 55, env=environ, fresh=True)


@pytest.mark.launch
def test_alone() -> None:
    done = start("mpicoll.doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert report["works"] is True
    assert report["facts"]["mpi"]["thread_level"] in ("SERIALIZED", "MULTIPLE")
    topics = {finding["topic"] for finding in report["findings"]}
    assert topics >= {"python", "torch", "MPI", "MPI threads", "mpiexec", "GPU", "CUDA-aware MPI", "shared memory"}


@pytest.mark.launch
def test_in_a_job_one_rank_reports() -> None:
    done = start("mpicoll.run", "--quiet", "-n", "3", "-m", "mpicoll.doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok    python:") == 1
    assert "ok    job: 3 ranks on 1 host" in done.stdout
    assert "ranks 0-2" in done.stdout


@pytest.mark.launch
def test_under_a_foreign_launcher_it_says_so_and_fails() -> None:
    """The other family's environment: this MPI does not know it, and starts alone or not at all."""
    done = start("mpicoll.doctor", MV2_COMM_WORLD_RANK="0", MV2_COMM_WORLD_SIZE="4")
    assert done.returncode == 1
    assert "FAIL  job: mvapich says rank 0 of 4, but MPI says rank 0 of 1" in done.stdout


@pytest.mark.launch
def test_no_mpi_and_bad_settings_fail_with_remedies() -> None:
    done = start("mpicoll.doctor", MPI4PY_LIBMPI="/nowhere/libmpi.so", MPICOLL_CUDA_AWARE="perhaps", MPICOLL_AWARE="1")
    assert done.returncode == 1
    assert "FAIL  MPI: mpi4py cannot load the MPI library /nowhere/libmpi.so" in done.stdout
    assert "MPICOLL_CUDA_AWARE='perhaps' is not allowed; use 1 or 0" in done.stdout
    assert "MPICOLL_AWARE is set, but mpicoll has no such variable" in done.stdout

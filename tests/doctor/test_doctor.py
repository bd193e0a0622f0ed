"""The doctor: each check on made-up facts, and the real report on this machine, alone and as a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpicoll._doctor.doctor as doctor
from mpicoll._discovery import find
from mpicoll._discovery.detect import Launch, without_job
from mpicoll._discovery.find import Mpi
from mpicoll._doctor.report import Finding
from tests.support import ROOT

OPENMPI = Mpi("Open MPI", (5, 0, 11), "/o/lib/libmpi.so.40")
MPICH = Mpi("MPICH", (5, 0, 2), "/m/lib/libmpi.so.12")
TORCH: dict[str, Any] = {
    "version": "2.13.0+cpu", "cuda": None, "hip": None, "threads": 2, "built_with_mpi": False, "entry_point": True,
    "accelerator": None, "accelerators": 0,
}  # fmt: skip
JOB: dict[str, Any] = {
    "vendor": "Open MPI", "size": 3, "rank": 0, "hosts": ["a", "a", "b"], "shared_memory_size": 2,
}  # fmt: skip


def states(findings: list[Finding]) -> list[str]:
    return [finding.state for finding in findings]


# --- torch ---


@pytest.mark.parametrize(
    ("version", "words"),
    [("2.13.0+cpu", "subclass of ProcessGroup"), ("2.14.1", "subclass of Backend"), ("2.15.0a0+git1", "subclass of Backend")],
)
def test_the_adapter_follows_from_torchs_version(version: str, words: str) -> None:
    (finding,) = doctor.check_torch({**TORCH, "version": version})
    assert finding.state == "ok"
    assert words in finding.text


def test_torch_that_is_missing_or_old_fails_with_a_remedy() -> None:
    for torch in ({"error": "ModuleNotFoundError: No module named 'torch'"}, {**TORCH, "version": "2.9.1"}):
        (finding,) = doctor.check_torch(torch)
        assert finding.state == "fail"
        assert "pip install" in finding.remedy


def test_a_torch_with_mpi_and_a_missing_entry_point_are_noted() -> None:
    findings = doctor.check_torch({**TORCH, "built_with_mpi": True, "entry_point": False})
    assert states(findings) == ["ok", "note", "note"]
    assert "MPICOLL_OVERRIDE_MPI=1" in findings[1].remedy
    assert "pip install" in findings[2].remedy


# --- MPI, job ---


@pytest.mark.parametrize(("level", "state"), [("MULTIPLE", "ok"), ("SERIALIZED", "ok"), ("FUNNELED", "fail"), ("SINGLE", "fail")])
def test_the_thread_level(level: str, state: str) -> None:  # trap 55
    started = {"thread_level": level, "mpi4py_version": "4", "mpi4py_file": "f", "library_version": "v"}
    assert states(doctor.check_mpi(OPENMPI, started)) == ["ok", state]


def test_an_mpi_that_does_not_start_is_reported() -> None:
    (finding,) = doctor.check_mpi(OPENMPI, {"error": "MPI did not answer within 1 s"})
    assert finding.state == "fail"
    assert "MPI did not answer" in finding.text


def test_a_hanging_or_dying_mpi_takes_nobody_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "probe.py"
    monkeypatch.setattr(find, "PROBE", script)
    script.write_text("import time; time.sleep(60)")
    assert "did not answer within 0.5 s" in find.probe("start", os.environ, 0.5)["error"]
    script.write_text("import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()")
    report = find.probe("start", os.environ, 20)
    assert "status -6" in report["error"]
    assert "last words" in report["error"]


def test_a_job_is_described() -> None:
    (finding,) = doctor.check_job(Launch("openmpi", 0, 3, 0, 2), JOB)
    assert finding.state == "ok"
    assert finding.text.startswith("3 ranks on 2 hosts")
    assert finding.evidence == ("a: ranks 0-1", "b: rank 2")


@pytest.mark.parametrize(("launcher", "remedy"), [("hydra", "mpicoll.run"), ("slurm", "--mpi=pmix")])
def test_n_singletons_are_found_out(launcher: str, remedy: str) -> None:  # traps 76, 79
    (finding,) = doctor.check_job(Launch(launcher, 0, 4, 0, 4), {**JOB, "size": 1, "hosts": ["a"]})
    assert finding.state == "fail"
    assert "rank 0 of 4, but MPI says rank 0 of 1" in finding.text
    assert remedy in finding.remedy


def test_containers_that_do_not_share_memory_are_noted() -> None:  # trap 78
    findings = doctor.check_job(Launch("openmpi", 0, 3, 0, 2), {**JOB, "shared_memory_size": 1})
    assert states(findings) == ["ok", "note"]
    assert "--ipc=host" in findings[1].remedy


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


def test_no_shared_memory_at_all() -> None:
    (finding,) = doctor.check_shared_memory("/no/such/folder")
    assert finding.state == "fail"


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "state"), [(None, 8, 8, "ok"), (4, 2, 8, "ok"), (4, 4, 8, "note"), (4, 1, 2, "note")]
)
def test_threads_times_ranks_against_cores(ranks: int | None, threads: int, cores: int, state: str) -> None:
    launch = None if ranks is None else Launch("openmpi", 0, ranks, 0, ranks)
    (finding,) = doctor.check_threads({}, launch, cores, threads)
    assert finding.state == state
    if state == "note" and threads > 1:
        assert finding.remedy == "OMP_NUM_THREADS=2"


def test_the_report() -> None:
    report = doctor.Report([Finding("ok", "a", "fine", ("because",)), Finding("note", "b", "look")])
    assert report.works
    assert report.as_text() == "ok    a: fine\n      because\nnote  b: look\neverything needed is here"
    report.findings.append(Finding("fail", "c", "broken", remedy="mend it"))
    assert not report.works
    assert report.as_text().endswith("FAIL  c: broken\n      -> mend it\n1 thing will not work; see FAIL above")
    assert json.loads(report.as_json())["findings"][2]["remedy"] == "mend it"


# --- the real thing ---


def start(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    here = {**without_job(os.environ), "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, env=here, capture_output=True, text=True, timeout=55, stdin=subprocess.DEVNULL)


@pytest.mark.launch
def test_alone() -> None:
    done = start("mpicoll.doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert report["works"] is True
    assert report["facts"]["mpi"]["thread_level"] in ("SERIALIZED", "MULTIPLE")
    topics = {finding["topic"] for finding in report["findings"]}
    assert topics >= {"python", "torch", "MPI", "MPI threads", "mpiexec", "GPU", "CUDA-aware MPI", "shared memory", "threads"}


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

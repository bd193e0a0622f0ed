"""Shared memory is removed only if MPI made it for this user since the job began, and nobody uses it."""

import mmap
import os
import time
from pathlib import Path

from mpicoll._launch import linux


def test_only_unused_files_of_mpi_go(tmp_path: Path) -> None:
    began = time.time() - 1
    unused = ("mpich_shm_1a_0", "mpich_vci_1a_0", "mpich_shar_tmpAbCdEf", "sm_segment.h.0.1.0", "vader_segment.h.0.1.0")
    for name in (*unused, "mpich_shm_open_0", "mpich_shm_mapped_0", "other_shm"):
        (tmp_path / name).write_bytes(bytes(4096))
    with (tmp_path / "mpich_shm_open_0").open("rb"), (tmp_path / "mpich_shm_mapped_0").open("r+b") as mapped:
        memory = mmap.mmap(mapped.fileno(), 4096)
        mapped.close()
        linux.remove_leftovers(began, tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["mpich_shm_mapped_0", "mpich_shm_open_0", "other_shm"]
        memory.close()


def test_files_from_before_the_job_stay(tmp_path: Path) -> None:
    (tmp_path / "mpich_shm_1a_0").touch()
    linux.remove_leftovers(time.time() + 1, tmp_path)
    assert os.listdir(tmp_path) == ["mpich_shm_1a_0"]

"""The MPI of Cray, which ends MPI_Init where GPU support is asked for and its GTL library is not there. A stand-in over MPICH.

The stand-in is a libmpi.so.12 of two functions of its own; all others are those of the MPICH that it is linked with, a copy of
which has another name.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import is_open_mpi

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(is_open_mpi(), reason="the stand-in is made of MPICH"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the stand-in needs a compiler"),
]

CRAY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int PMPI_Init_thread(int *, char ***, int, int *);
int MPI_Get_library_version(char *version, int *length) {
    strcpy(version, "MPI VERSION    : CRAY MPICH version 8.1.30.0 (ANL base 3.4a2)\n");
    *length = strlen(version);
    return 0;
}
int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    const char *asked = getenv("MPICH_GPU_SUPPORT_ENABLED");
    if (asked && atoi(asked) && !dlsym(RTLD_DEFAULT, "gtl_of_the_stand_in")) {
        fputs("MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked\n", stderr);
        _exit(255);
    }
    return PMPI_Init_thread(argc, argv, required, provided);
}
"""
GTL = "int gtl_of_the_stand_in(void) { return 0; }"
PROGRAM = """
import mpicoll as dist, torch, sys
dist.init_process_group()
tensor = torch.ones(1)
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    print("sum", tensor.item())
"""


def compiled(text: str, library: Path, *options: str) -> None:
    source = library.with_suffix(".c")
    source.write_text(text)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, *options], check=True, timeout=60)


@pytest.fixture
def cray(tmp_path: Path) -> dict[str, str]:
    """The environment of a program that loads the stand-in, as a module of a site with GPUs would set it."""
    mpich = Path(sys.prefix) / "lib/libmpi.so.12"
    if not mpich.exists():
        pytest.skip("MPICH is not in this environment")
    (tmp_path / "libmpr.so.12").write_bytes(mpich.read_bytes().replace(b"\0libmpi.so.12\0", b"\0libmpr.so.12\0"))
    mpi = tmp_path / "libmpi.so.12"
    compiled(CRAY, mpi, "-Wl,-soname,libmpi.so.12", f"-L{tmp_path}", "-l:libmpr.so.12", f"-Wl,-rpath,{tmp_path}", "-ldl")
    folders = f"{tmp_path}:{mpich.parent}:{mpich.parent}/mpich:{os.environ.get('LD_LIBRARY_PATH', '')}"
    return {**os.environ, "MPI4PY_LIBMPI": str(mpi), "LD_LIBRARY_PATH": folders, "MPICH_GPU_SUPPORT_ENABLED": "1"}


def run(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, timeout=120, check=False)


def with_gtl(environ: dict[str, str], root: Path, name: str) -> dict[str, str]:
    (root / "gtl/lib").mkdir(parents=True)
    compiled(GTL, root / "gtl/lib" / name)
    return {**environ, "CRAY_MPICH_ROOTDIR": str(root)}


def test_the_stand_in_ends_mpi4py_alone(cray: dict[str, str]) -> None:
    ended = run(cray, "-c", "from mpi4py import MPI")
    assert ended.returncode == 255
    assert "GTL library is not linked" in ended.stderr


def test_without_a_gtl_the_request_is_taken_back(cray: dict[str, str]) -> None:
    ended = run(cray, "-m", "mpicoll.run", "-n", "2", "-c", PROGRAM)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "sum 2.0\n"
    (line,) = [line for line in ended.stderr.splitlines() if "MPICH_GPU_SUPPORT_ENABLED" in line]
    assert line == (
        "mpicoll: MPICH_GPU_SUPPORT_ENABLED=1: neither libmpi_gtl_cuda.so nor libmpi_gtl_hsa.so can be loaded, so it is 0 in "
        "this job, and MPI gets no GPU memory"
    )


@pytest.mark.parametrize("name", ["libmpi_gtl_cuda.so", "libmpi_gtl_hsa.so"])
def test_the_gtl_is_loaded_before_mpi(cray: dict[str, str], tmp_path: Path, name: str) -> None:
    environ = with_gtl(cray, tmp_path / "mpich", name)
    ended = run(environ, "-m", "mpicoll.run", "-n", "2", "-c", PROGRAM)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "sum 2.0\n"
    assert ended.stderr == f"mpicoll: MPICH_GPU_SUPPORT_ENABLED=1: {tmp_path}/mpich/gtl/lib/{name} is loaded\n"


def test_that_of_the_gpus_comes_first(cray: dict[str, str], tmp_path: Path) -> None:
    environ = with_gtl(cray, tmp_path / "mpich", "libmpi_gtl_cuda.so")
    compiled(GTL, tmp_path / "mpich/gtl/lib/libmpi_gtl_hsa.so")
    ended = run({**environ, "CRAY_ACCEL_TARGET": "amd_gfx90a"}, "-c", PROGRAM)
    assert "libmpi_gtl_hsa.so is loaded" in ended.stderr


def test_a_value_of_0_is_left_alone(cray: dict[str, str]) -> None:
    ended = run({**cray, "MPICH_GPU_SUPPORT_ENABLED": "0"}, "-c", PROGRAM)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "sum 1.0\n", "")


@pytest.mark.parametrize("gtl", [False, True])
def test_the_doctor_says_what_a_rank_does(cray: dict[str, str], tmp_path: Path, gtl: bool) -> None:
    environ = with_gtl(cray, tmp_path / "mpich", "libmpi_gtl_hsa.so") if gtl else cray
    ended = run(environ, "-m", "mpicoll.doctor")
    said = " ".join(ended.stdout.split())
    assert ended.returncode == 0, ended.stdout
    expected = f"mpicoll loads {tmp_path}/mpich/gtl/lib/libmpi_gtl_hsa.so before MPI" if gtl else "mpicoll sets it to 0"
    assert f"MPICH_GPU_SUPPORT_ENABLED=1{': ' if gtl else ', and no GTL library can be loaded: '}{expected}" in said

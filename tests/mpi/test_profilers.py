"""Profilers of MPI (mpiP, Score-P): a library before MPI whose functions have MPI's names, and call those of PMPI."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import launch

pytestmark = [pytest.mark.launch, pytest.mark.skipif(shutil.which("mpicc") is None, reason="the profiler needs a compiler")]

PROFILER = r"""
#include <mpi.h>
#include <stdio.h>
static int calls;
int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    fputs("profiler: begins\n", stderr);
    return PMPI_Init_thread(argc, argv, required, provided);
}
int MPI_Allreduce(const void *source, void *target, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    calls++;
    return PMPI_Allreduce(source, target, count, type, op, comm);
}
#if MPI_VERSION >= 4  /* mpi4py takes the functions of large counts, where MPI has them */
int MPI_Allreduce_c(const void *source, void *target, MPI_Count count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    calls++;
    return PMPI_Allreduce_c(source, target, count, type, op, comm);
}
#endif
int MPI_Finalize(void) {
    fprintf(stderr, "profiler: %d calls of MPI_Allreduce\n", calls);
    return PMPI_Finalize();
}
"""
PROGRAM = """
import torch

import mpicoll as dist

dist.init_process_group()
for _ in range(10):
    dist.all_reduce(torch.ones(2))
"""


def test_a_profiler_sees_the_start_the_calls_and_the_end(tmp_path: Path) -> None:
    """It saw neither start nor end: mpicoll called them by the library that mpi4py is linked with. mpiP reports at the end."""
    source, library = tmp_path / "profiler.c", tmp_path / "profiler.so"
    source.write_text(PROFILER)
    if subprocess.run(["mpicc", "-shared", "-fPIC", "-o", library, source], timeout=60, capture_output=True).returncode:
        pytest.skip("mpicc does not work here")
    done = launch(2, "-c", f"import os; os.environ['LD_PRELOAD'] = ''\n{PROGRAM}", env={"LD_PRELOAD": str(library)}, fresh=True)
    assert done.returncode == 0, done.stderr
    for words in ("profiler: begins", "profiler: 10 calls of MPI_Allreduce"):
        assert done.stderr.count(words) == 2, done.stderr

"""Reports on MPI from a process of its own, so that a broken MPI can neither hang nor kill the program that asks.

Run as a script, by path (``python .../probe.py library|start|job``); it imports nothing of mpicoll. Prints one line,
`MARK` and a JSON object, beside anything that MPI prints. `installations.probe` starts it and reads the line.

    library   which MPI library mpi4py loads; MPI is not started (about 0.1 s)
    start     library, and MPI_Init in this process alone: thread level, limits, answers about CUDA
    job       start, as a rank under mpiexec: size, and on rank 0 the host of every rank
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from typing import Any

MARK = "MPICOLL_REPORT "  # begins the line of a report
LIBRARIES = ("libmpi.so", "libmpi_abi.so", "libmpich.so", "libmpi_cray.so")
THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def library() -> dict[str, Any]:
    """The MPI that mpi4py loads: vendor, version and file; and mpi4py itself. Does not start MPI."""
    import mpi4py

    mpi4py.rc.initialize = False
    return loaded()


def loaded() -> dict[str, Any]:
    """`library`, and what `start` adds if MPI is running. mpi4py.MPI must have been imported."""
    import mpi4py
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    library_file = loaded_library()
    report: dict[str, Any] = {
        "vendor": vendor,
        "version": list(version),
        "library_version": MPI.Get_library_version().strip("\0\n "),
        "library_file": library_file,
        "mpi4py_version": mpi4py.__version__,
        "mpi4py_file": MPI.__file__,
        # wheels choose the library at run time and have an empty configuration; an mpi4py that was built here is bound to one
        "mpi4py_bound": bool(mpi4py.get_config()),
    }
    if MPI.Is_initialized() and not MPI.Is_finalized():
        level = MPI.Query_thread()
        report["thread_level"] = next(name for name in THREAD_LEVELS if level == getattr(MPI, f"THREAD_{name}"))
        report["tag_ub"] = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        report["size"] = MPI.COMM_WORLD.Get_size()
        report["processor_name"] = MPI.Get_processor_name()
        report["cuda_query"] = cuda_query(library_file)
    return report


def start() -> dict[str, Any]:
    """`library`, and facts about MPI after MPI_Init."""
    library()
    from mpi4py import MPI

    # torch asks for several threads; MULTIPLE is what mpi4py asks for by default
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return loaded()


def job() -> dict[str, Any]:
    """`start`, and on rank 0 the host names of all ranks (collective over the job)."""
    report = start()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    report["rank"] = world.Get_rank()
    report["hosts"] = world.gather(MPI.Get_processor_name(), 0)
    report["shared_memory_size"] = world.Split_type(MPI.COMM_TYPE_SHARED).Get_size()
    return report


def loaded_library() -> str | None:
    """The libmpi that is mapped into this process; None where there is no /proc."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        files = sorted({line.split(maxsplit=5)[5].strip() for line in maps if "/" in line})
        for starts in (LIBRARIES, ("libmpi_", "libmpich", "libmpi-", "libmpi.")):
            for file in files:
                if os.path.basename(file).startswith(starts):
                    return file
    return None


def cuda_query(library_file: str | None) -> dict[str, int]:
    """The answers of the library about GPU memory, by function name. Evidence only: Open MPI 4 always answers 1."""
    if library_file is None:
        return {}
    answers: dict[str, int] = {}
    loaded = ctypes.CDLL(library_file)
    if hasattr(loaded, "MPIX_Query_cuda_support"):  # Open MPI, MVAPICH, Cray MPICH
        answers["MPIX_Query_cuda_support"] = int(loaded.MPIX_Query_cuda_support())
    if hasattr(loaded, "MPIX_GPU_query_support"):  # MPICH; 0 stands for CUDA
        answer = ctypes.c_int(0)
        if loaded.MPIX_GPU_query_support(0, ctypes.byref(answer)) == 0:
            answers["MPIX_GPU_query_support"] = answer.value
    return answers


if __name__ == "__main__":
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != os.path.dirname(os.path.abspath(__file__))]
    try:
        report = {"library": library, "start": start, "job": job}[sys.argv[1]]()
    except Exception as error:  # noqa: BLE001  the report is the way out for whatever mpi4py and MPI raise
        report = {"error": f"{type(error).__name__}: {error}"}
    print(f"\n{MARK}{json.dumps(report)}", flush=True)
    if "thread_level" in report:
        from mpi4py import MPI

        MPI.Finalize()  # after the report, so that a failure here does not lose it
    sys.exit(1 if "error" in report else 0)

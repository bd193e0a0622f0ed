"""``python -m mpicoll.doctor``: reports what is installed here, with evidence, and how to repair what will not work.

    python -m mpicoll.doctor                          this machine
    python -m mpicoll.run -n 4 -m mpicoll.doctor      this machine and the job; rank 0 prints the report
    mpirun -n 4 python -m mpicoll.doctor              is this mpirun the right one?
    python -m mpicoll.doctor --run                    does an all_reduce of two ranks work here?
    python -m mpicoll.doctor --run --hostfile FILE    and between the hosts of FILE, one rank on each?
    python -m mpicoll.doctor --json                   the report for programs
    python -m mpicoll.doctor dump FOLDER              where do the ranks of a job diverge? See dump.py

Everything that could hang or crash (loading and starting MPI, importing torch) runs in a process of its own with a time limit.
Exit status 0: everything will work; 1: something will not. Each check is a function that returns `Finding`s; `examine` calls
them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mpicoll._base.binding as binding
from mpicoll._base import config, containers, cray, inherited, launcher, open_mpi_settings
from mpicoll._base.cpus import allowed, usable_cores
from mpicoll._base.errors import LaunchError
from mpicoll._base.facts import ranks_in_words
from mpicoll._base.launcher import Launch
from mpicoll._base.packages import installed_wheels
from mpicoll._base.stdout import quiet_without_reader
from mpicoll._launch.doctor import cluster, dump, trial
from mpicoll._launch.doctor.report import Finding, Report, size_in_words
from mpicoll._launch.find import allocation, cuda_support, installations
from mpicoll._launch.find.installations import Mpi, torch_facts

MINIMUM_SHARED_MEMORY = 64 * 2**20  # bytes; below it MPI itself may fail to start a few ranks
USUAL_SHARED_MEMORY = 1 * 2**30  # bytes; DataLoader workers and large messages of MPI on one host need about that
SHARED_MEMORY = "/dev/shm"
MINIMUM_TORCH, BACKEND_FROM = (2, 11), (2, 14)
THREADS = {"MULTIPLE": "calls from several threads at once", "SERIALIZED": "mpicoll will let one thread call at a time"}


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Reports which MPI, torch and hardware are here, with evidence, and how to repair what will not work.",
        epilog=f"`{prog} dump FOLDER` compares the flight records of a job, and says where its ranks part",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: works, findings, facts")
    parser.add_argument("--run", action="store_true", help="also start 2 ranks here, and check and time an all_reduce")
    parser.add_argument(
        "--hostfile", metavar="FILE", help="with --run: also try an all_reduce between one rank on each host of FILE"
    )
    return parser


@quiet_without_reader
def main(argv: Sequence[str] | None = None, prog: str = "python -m mpicoll.doctor") -> int:
    """Prints the report (in a job on rank 0 only). Returns 0 if everything will work, else 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["dump"]:
        return dump.main(words[1:], f"{prog} dump")
    parser = make_parser(prog)
    options = parser.parse_args(words)
    if options.hostfile and not options.run:
        parser.error("--hostfile says where --run starts ranks; add --run")
    launch = launcher.detect()
    settings = config.problems()
    for name in [name for name in os.environ if config.problems({name: os.environ[name]})]:
        del os.environ[name]  # reported below; the checks run without it
    containers.prepare(os.environ, launch)
    gtl = cray.advice(os.environ)
    # All ranks must start MPI; then rank 0 reports.
    job = installations.probe("job", os.environ, keep_files=True) if launch is not None else None
    if launch is not None and launch.rank != 0:
        return 0
    environ = inherited.without_job(os.environ)
    report = examine(environ, launch, job)
    if gtl is not None:
        report.findings.append(Finding("note", "Cray MPICH", gtl[0], remedy=gtl[1]))
    if options.run:
        report.facts["trial"] = trial.run(environ)
        report.findings.append(trial.check(report.facts["trial"]))
    if options.hostfile:
        report.findings.append(try_hosts(options.hostfile, environ, report.facts))
    report.findings += [Finding("fail", "settings", problem, remedy="correct or unset it") for problem in settings]
    print(report.as_json() if options.json else report.as_text(), flush=True)
    return 0 if report.works else 1


def try_hosts(path: str, environ: Mapping[str, str], facts: dict[str, Any]) -> Finding:
    """The trial on the hosts of that file; its result joins ``facts``."""
    try:
        facts["trial_on_hosts"] = trial.run_on_hosts(path, environ)
    except (OSError, ValueError) as error:
        return Finding("fail", trial.HOSTS, f"cannot read the hosts: {error}", remedy="write one host a line: node01 slots=4")
    return trial.check_hosts(path, facts["trial_on_hosts"])


def examine(environ: Mapping[str, str], launch: Launch | None = None, job: Mapping[str, Any] | None = None) -> Report:
    """The report on this machine and, in a job, on the job. environ: of a new job. job: from MPI; see ``_base/probe.py``."""
    torch = torch_facts(os.environ)
    report = Report([Finding("ok", "python", f"{sys.version.split()[0]} ({sys.executable})")], {"torch": torch})
    report.findings += check_torch(torch)
    mpi, started = _mpi(environ, report)
    if mpi is not None:
        report.findings += check_mpiexec(mpi, environ)
    _cluster(mpi, environ, report)
    if launch is not None and job is not None:
        report.facts["job"] = {"launcher": launch.launcher, "size": launch.size, **job}
        report.findings += check_job(launch, job)
        if container := containers.advice(os.environ, launch):
            report.findings.append(Finding("note", "container", container[0], remedy=container[1]))
    verdict = None if mpi is None else cuda_support.decide(started, environ, cuda_support.driver_loads())
    report.facts["gpu_memory"] = None if verdict is None else asdict(verdict)
    report.findings += check_gpus(torch, verdict, environ)
    report.findings += check_shared_memory(SHARED_MEMORY)
    available = None if launch is None else binding.cores_for_ranks(launch, environ)
    if advice := binding.advice(launch, allowed(), available, waits_busily=False):
        report.findings.append(Finding("note", "binding", advice))
    report.facts["cores"] = usable_cores()
    return report


def _cluster(mpi: Mpi | None, environ: Mapping[str, str], report: Report) -> None:
    """Adds the findings about the scheduler and the network between nodes."""
    report.findings += cluster.check_scheduler(allocation.find(environ), mpi, installations.srun_types(environ))
    if mpi is None:
        return
    ours = open_mpi_settings.of_version(mpi.version, one_host=False) if mpi.vendor == "Open MPI" else {}
    fabrics, said = cluster.fabrics(), installations.start_output({**ours, **environ, **cluster.SAYS})
    used = cluster.in_use(said)
    report.facts["network"] = {"fabrics": [asdict(fabric) for fabric in fabrics], "in_use": used and used.words}
    verbs, wheels = os.path.isdir("/dev/infiniband"), tuple(installed_wheels())
    report.findings += cluster.check_network(fabrics, mpi, used, verbs, wheels)


# --- the checks -------------------------------------------------------------------------------------------------------


def check_torch(torch: Mapping[str, Any]) -> list[Finding]:
    """The version of torch, and how mpicoll plugs into it."""
    if "error" in torch:
        return [Finding("fail", "torch", f"cannot be imported: {torch['error']}", remedy="pip install torch (2.11 or later)")]
    version = release(str(torch["version"]))
    if version < MINIMUM_TORCH:
        return [Finding("fail", "torch", f"{torch['version']} is too old", remedy="pip install 'torch>=2.11'")]
    how = "Backend (torch 2.14 and later)" if version >= BACKEND_FROM else "ProcessGroup (torch 2.13 and before)"
    findings = [Finding("ok", "torch", f"{torch['version']}; mpicoll plugs in as a subclass of {how}")]
    if torch["built_with_mpi"]:
        text = 'this torch was built with MPI: its own backend keeps the name "mpi", and mpicoll\'s is "mpicoll"'
        findings.append(Finding("note", "torch", text, remedy="MPICOLL_OVERRIDE_MPI=1 gives the name to mpicoll"))
    if not torch["entry_point"]:
        text = "mpicoll is not installed here, only importable: a script that never imports mpicoll will not find the backend"
        remedy = "`pip install .` in its source folder"
        findings.append(Finding("note", "torch", f'{text} "mpi"', remedy=remedy))
    return findings


def release(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int("".join(letter for letter in minor if letter.isdigit()) or "0")


def _mpi(environ: Mapping[str, str], report: Report) -> tuple[Mpi | None, dict[str, Any]]:
    """The MPI that mpi4py loads, or None, and the report of that MPI when it starts alone. Adds the findings."""
    try:
        mpi = installations.find_mpi(None, environ)
    except LaunchError as error:
        report.findings.append(Finding("fail", "MPI", str(error)))
        return None, {}
    started = installations.probe("start", environ)
    report.facts["mpi"] = started
    report.findings += check_mpi(mpi, started)
    return mpi, started


def check_mpi(mpi: Mpi, started: Mapping[str, Any]) -> list[Finding]:
    """Library, version and thread level."""
    if "error" in started:
        remedy = "run the same by hand to see more: python -c 'from mpi4py import MPI; print(MPI.Get_library_version())'"
        return [Finding("fail", "MPI", f"{mpi} is here but does not start: {started['error']}", remedy=remedy)]
    mpi4py = f"mpi4py {started['mpi4py_version']} ({started['mpi4py_file']})"
    found = Finding("ok", "MPI", str(mpi), (mpi4py, str(started["library_version"]).splitlines()[0]))
    level = started["thread_level"]
    if level in THREADS:
        return [found, Finding("ok", "MPI threads", f"MPI_THREAD_{level}: {THREADS[level]}")]
    text = f"MPI_THREAD_{level}; mpicoll needs SERIALIZED or MULTIPLE"
    remedy = "use an MPI built with thread support (--enable-mpi-thread-multiple)"
    return [found, Finding("fail", "MPI threads", text, remedy=remedy)]


def check_mpiexec(mpi: Mpi, environ: Mapping[str, str]) -> list[Finding]:
    """The mpiexec of mpicoll.run, and whether plain mpirun belongs to the same MPI."""
    try:
        mpiexec = installations.find_mpiexec(mpi, environ)
    except LaunchError as error:
        return [Finding("fail", "mpiexec", str(error))]
    findings = [Finding("ok", "mpiexec", f"{mpiexec}; belongs to this MPI")]
    for name in ("mpirun", "mpiexec"):
        plain = shutil.which(name, path=environ.get("PATH", ""))
        if plain is None:
            continue
        other = installations.identify(Path(plain), environ)
        if not installations.fits(other, mpi):
            alone = f"`{name} -n 4 python ...` would start 4 programs that are each rank 0 of 1"
            remedy = "start programs with `python -m mpicoll.run`, or with the path above"
            findings.append(Finding("note", "mpiexec", f"`{name}` in PATH is another one ({other}): {alone}", remedy=remedy))
    return findings


def check_job(launch: Launch, job: Mapping[str, Any]) -> list[Finding]:
    """Whether MPI agrees with the launcher's environment, and where the ranks are."""
    said = f"{launch.launcher} says rank {launch.rank} of {launch.size}"
    remedy = "start the program with `python -m mpicoll.run`, which finds the right mpiexec"
    if "error" in job:
        first, *rest = str(job["error"]).splitlines()
        return [Finding("fail", "job", f"MPI does not start under this launcher: {first}", (said, *rest[-2:]), remedy)]
    if job["size"] != launch.size:
        text = f"this launcher belongs to another MPI than {job['vendor']}, and each rank is alone"
        if launch.launcher == "slurm":
            pmi = installations.PMI[Mpi(job["vendor"], (), None).family][0]
            remedy = f"srun -K --mpi={pmi} ..., or `python -m mpicoll.run` inside the allocation"
        return [Finding("fail", "job", f"{said}, but MPI says rank 0 of {job['size']}: {text}", remedy=remedy)]
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(job.get("hosts") or ()):
        hosts.setdefault(host, []).append(rank)
    where = tuple(f"{host}: {ranks_in_words(ranks)}" for host, ranks in hosts.items())
    text = f"{job['size']} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}, started by {launch.launcher}"
    findings = [Finding("ok", "job", text, where)]
    local, sharing = len(next((ranks for ranks in hosts.values() if job["rank"] in ranks), [])), job["shared_memory_size"]
    if sharing < local:
        text = f"{local} ranks are on this host, but only {sharing} of them share memory"
        text += " (containers with a /dev/shm of their own?)"
        findings.append(Finding("note", "job", text, remedy="let the containers of a host share /dev/shm (docker --ipc=host)"))
    return findings


def check_gpus(torch: Mapping[str, Any], verdict: cuda_support.Verdict | None, environ: Mapping[str, str]) -> list[Finding]:
    """The GPUs, and the path that GPU tensors would take. verdict: of the MPI; None: there is no MPI."""
    findings = [_gpus(torch)]
    if verdict is None:
        return findings
    near = ", or, between ranks of one node, from GPU to GPU (CUDA IPC)" if config.get("MPICOLL_CUDA_IPC", environ) else ""
    text = (
        "this MPI takes GPU memory: it gets tensors on a GPU directly, if that holds on every rank"
        if verdict.moves
        else f"no evidence that MPI takes GPU memory: tensors on a GPU travel through pinned host memory{near}"
    )
    return [*findings, Finding("ok", "CUDA-aware MPI", text, verdict.evidence)]


def _gpus(torch: Mapping[str, Any]) -> Finding:
    if "error" in torch:
        return Finding("note", "GPU", "unknown, as torch cannot be imported")
    kinds = [f"built for {name} {torch[key]}" for name, key in (("CUDA", "cuda"), ("ROCm", "hip")) if torch[key]]
    built = f"torch is {(*kinds, 'a CPU build')[0]}"
    if torch["accelerators"]:
        return Finding("ok", "GPU", f"{torch['accelerators']} x {torch['accelerator']}; {built}")
    files = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    if torch["cuda"] and files:
        text = f"{built} and a GPU is here ({files[0]}), but torch cannot use it"
        return Finding("note", "GPU", text, remedy="compare `nvidia-smi` with torch's CUDA version")
    return Finding("ok", "GPU", f"none in use; {built}")


def check_shared_memory(path: str) -> list[Finding]:
    """Size and free space of the shared memory that the ranks of a host use."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        text = f"{path} cannot be used ({error.strerror}); ranks of one host exchange data through it"
        return [Finding("fail", "shared memory", text, remedy=f"mount a tmpfs on {path}")]
    size, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    text = f"{path}: {size_in_words(size)}, {size_in_words(free)} free"
    if not os.access(path, os.W_OK):
        return [Finding("fail", "shared memory", f"{text}, but not writable for this user", remedy=f"chmod 1777 {path}")]
    if free < MINIMUM_SHARED_MEMORY:
        remedy = f"remove what is left over in {path}, or enlarge it (docker --shm-size=8g; mount -o remount,size=8g {path})"
        return [Finding("fail", "shared memory", f"{text}; MPI may fail to start", remedy=remedy)]
    if free < USUAL_SHARED_MEMORY:
        remedy = "enlarge it before moving large tensors between ranks of one host (docker --shm-size=8g)"
        return [Finding("note", "shared memory", f"{text}; little", remedy=remedy)]
    return [Finding("ok", "shared memory", text)]

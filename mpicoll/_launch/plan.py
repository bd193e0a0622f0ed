"""Turns the request of the user into the command of mpiexec. Pure: all facts about the machine are in a `Site`.

    programs, hosts, options  ->  the host of each rank  ->  Plan: command, environment, notes

    option                Open MPI 5             Open MPI 4              Hydra (MPICH)
    --bind-to UNIT        --bind-to UNIT         --bind-to UNIT          -bind-to UNIT
    --map-by UNIT         --map-by UNIT          --map-by UNIT           -map-by UNIT
    --tag-output          --output tag           --tag-output            -prepend-rank
    --log-dir DIR         mpicoll._launch.rank   mpicoll._launch.rank    mpicoll._launch.rank
    --fault-tolerant      --with-ft ulfm         refused                 refused

What is added to the environment, where it applies and the user has not set something else:

    Open MPI, uid 0                  OMPI_ALLOW_RUN_AS_ROOT, ..._CONFIRM   it refuses root, e.g. in a container
    Open MPI                         binding policy none                   Note [Why no binding]
    Open MPI                         oversubscribe                         it refuses more ranks than cores or slots
    Open MPI 5, several hosts        oob_tcp_keepalive_*                   notices a host that is gone after 11 s, not never
    MPICH in a Slurm allocation      SLURM_MPI_TYPE=none, always           Hydra's srun must not start PMI; sites set pmix
    in a task of srun                SLURM_OVERLAP=1                       an srun of mpiexec would wait for that task's CPUs
    all                              MASTER_ADDR, MASTER_PORT              the first host, and a port that is free here

What a rank itself reads, it sets when it starts, under any launcher: `mpicoll._base.open_mpi_settings`, `mpicoll._base.binding`.

# Note [Who reads the allocation]
Both kinds of mpiexec read Slurm's allocation, with the counts of all of Slurm's options; nothing is added there. Of the others,
Open MPI 5 reads PBS_NODEFILE only, Open MPI 4 what it was built with, and Hydra PBS_NODEFILE (MPICH 5.0.2 of PyPI ran on one host
in a job of LSF). Therefore the hosts of all other schedulers are on the command line. mpiexec starts its daemons by ssh, unless
it was built with the scheduler's library.

# Note [Log files]
The options of mpiexec for output files differ, Open MPI 5.0.11 loses standard error with --output dir=DIR, and Hydra needs the
folder on every host beforehand. Therefore each rank redirects its own output before the program starts.

# Note [Always oversubscribe]
Open MPI 5.0.11 lets its ranks yield their cores where there are more ranks than cores, and only there, whether this is allowed or
not (on 2 cores 1 and 2 ranks do not yield, 4 do). So it costs nothing where it is not needed. The ranks are placed by slot:
with the modifier alone, Open MPI 5.0.11 starts all of them on the first host, also with --host a:2,b:2. If the user
binds ranks, Open MPI places them by its own default: it spreads them over the sockets.

# Note [Why no binding]
Open MPI binds each rank to one core if a job has one or two ranks: see Note [One core for a rank] in _base/binding.py. A binding
that the user sets, by --bind-to or in the environment, stays.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from mpicoll._base.errors import LaunchError
from mpicoll._base.inherited import SUPERVISOR
from mpicoll._launch.find.hostfile import Host
from mpicoll._launch.find.installations import Mpi, Mpiexec
from mpicoll._launch.job import LOCAL, NOTHING_ASKED, Plan, Program, Request, Site
from mpicoll._launch.linux import KEEPALIVE

# Variables that other hosts get. mpirun of Open MPI passes on OMPI_* by itself, Hydra everything.
FORWARDED = re.compile(
    r"(_?MPICOLL|MPI4PY|TORCH|TORCHINDUCTOR|PYTORCH|OMP|KMP|MKL|OPENBLAS|GLOO|NCCL|CUDA|UCX|FI|HF|WANDB)_[A-Z0-9_]+"
    r"|PYTHON[A-Z0-9_]*|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS)|LD_LIBRARY_PATH|LD_PRELOAD|MASTER_ADDR|MASTER_PORT|VIRTUAL_ENV"
)

# Settings by which the user may have chosen a binding: then no binding is added.
BINDING_SETTINGS = (
    "PRTE_MCA_hwloc_default_binding_policy",
    "OMPI_MCA_hwloc_base_binding_policy",
    "OMPI_MCA_rmaps_base_mapping_policy",
)
BINDING_OPTIONS = ("--bind-to", "--map-by", "--rankfile", "--cpu-set", "--cpus-per-rank")


def plan(programs: Sequence[Program], mpi: Mpi, mpiexec: Mpiexec, site: Site, request: Request = NOTHING_ASKED) -> Plan:
    """The command that starts ``programs`` as one job.

    Raises:
        LaunchError: The numbers contradict each other, or this mpiexec lacks an option; the message names the remedy.
    """
    return _Job(programs, mpi, mpiexec, site, request).plan()


class _Job:
    """What a plan is made of.

    Attributes:
        prrte: From Open MPI 5 on PRRTE starts the ranks; it has settings of its own.
        counts: The ranks of each program.
        places: The host of each rank; None: mpiexec decides.
        first_host: As its ranks name it.
        others: The other hosts, as far as they are known before the start.
    """

    def __init__(self, programs: Sequence[Program], mpi: Mpi, mpiexec: Mpiexec, site: Site, request: Request) -> None:
        self.programs, self.mpi, self.mpiexec, self.site, self.request = programs, mpi, mpiexec, site, request
        self.openmpi = mpiexec.family == "openmpi"
        self.prrte = mpi.vendor == "Open MPI" and mpi.version[:1] >= (5,) and self.openmpi
        self.notes: list[str] = []
        hosts = _hosts(programs, site, request)
        self.counts = [
            _count(hosts, site, request, self.notes) if program.ranks is None else program.ranks for program in programs
        ]
        self.places = None if hosts is None else _places(hosts, sum(self.counts), request.per_node)
        allocated = () if site.allocation is None else (name for name, _ in site.allocation.nodes)
        names = tuple(dict.fromkeys(self.places or allocated))
        self.others = tuple(host for host in names if not site.is_here(host))
        self.several_hosts = len(names) > 1 or (self.places is not None and self.others != ())
        self.first_host = "localhost"
        if self.several_hosts:
            self.first_host = names[0] if names[0] not in LOCAL else site.names[0]
        else:
            self.others = ()

    def plan(self) -> Plan:
        added = {**self.mpi.environ, **self.mpiexec.environ, **self.additions()}
        forwarded = (*filter(FORWARDED.fullmatch, (*self.site.environ, *added)), SUPERVISOR) if self.several_hosts else ()
        exported = (item.partition("=")[0] for item in self.request.exported)
        words = self.command(added, sorted({*forwarded, *exported}))
        return Plan(words, added, self.mpiexec.family, tuple(self.notes), self.others)

    # --- the environment ---

    def additions(self) -> dict[str, str]:
        """The variables to add."""
        site, wanted = self.site, dict[str, str]()
        if self.mpi.family == "openmpi":
            wanted |= self._for_mpirun()
        elif "SLURM_JOB_ID" in site.environ:
            wanted["SLURM_MPI_TYPE"] = "none"
        wanted["MASTER_ADDR"] = self.first_host
        wanted |= {} if site.decided("MASTER_PORT") else {"MASTER_PORT": str(site.free_port())}
        if site.in_step:
            wanted["SLURM_OVERLAP"] = "1"
        added = {name: value for name, value in wanted.items() if name == "SLURM_MPI_TYPE" or not site.decided(name)}
        if self.request.max_restarts is not None:
            added["TORCHELASTIC_RESTART_COUNT"] = str(self.request.restart)
            added["TORCHELASTIC_MAX_RESTARTS"] = str(self.request.max_restarts)
        return added

    def _for_mpirun(self) -> dict[str, str]:
        """The settings for the mpiexec of Open MPI itself."""
        site, request, wanted = self.site, self.request, dict[str, str]()
        if site.uid == 0:
            wanted |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        if request.bind_to in (None, "none"):  # Note [Always oversubscribe]
            policy = {"PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe"}
            wanted |= policy if self.prrte else {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
        binding = request.bind_to is not None or request.map_by is not None or any(map(site.decided, BINDING_SETTINGS))
        if not binding and not any(word.startswith(BINDING_OPTIONS) for word in request.mpiexec_args):
            wanted[BINDING_SETTINGS[0] if self.prrte else BINDING_SETTINGS[1]] = "none"
        if self.prrte and self.several_hosts:
            wanted |= {f"PRTE_MCA_oob_tcp_keepalive_{name}": str(number) for name, number in KEEPALIVE.items()}
        return wanted

    # --- the command ---

    def command(self, added: Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
        """The command. added: to the environment. names: variables that other hosts get."""
        request = self.request
        if self.mpi.vendor == "Intel MPI" and (request.bind_to is not None or request.map_by is not None):
            raise LaunchError("--bind-to and --map-by: Intel MPI binds by its own variables; set I_MPI_PIN_DOMAIN=core, or auto")
        if request.fault_tolerant and not self.prrte:
            raise LaunchError(
                f"--fault-tolerant: {self.mpi.vendor} {'.'.join(map(str, self.mpi.version))} ends the job when a rank dies; Open"
                " MPI 5 can go on (--mpi openmpi). With every MPI, programs can save checkpoints and start again"
            )
        dashes = "--" if self.openmpi else "-"
        words = [] if request.map_by is None else [f"{dashes}map-by", request.map_by]  # in the words of this mpiexec
        words += [] if request.bind_to is None else [f"{dashes}bind-to", request.bind_to]
        if request.tag_output:
            words += ["--output", "tag"] if self.prrte else ["--tag-output"] if self.openmpi else ["-prepend-rank"]
        words += ["--with-ft", "ulfm"] if request.fault_tolerant else []
        words += self._openmpi_words(names) if self.openmpi else self._hydra_words(added, names)
        return (self.mpiexec.path, *request.mpiexec_args, *words)

    def _openmpi_words(self, names: Sequence[str]) -> list[str]:
        request, words, begin = self.request, list[str](), 0
        for program, ranks in zip(self.programs, self.counts, strict=True):
            words += [*([":"] if begin else []), "-n", str(ranks)]
            if self.places is not None:
                words += ["--host", _spelled(self.places[begin : begin + ranks])]
            elif request.per_node is not None and self.several_hosts:
                if request.map_by is not None:
                    raise LaunchError(f"--map-by {request.map_by} and --nproc-per-node both place the ranks; give one of them")
                words += ["--map-by", f"ppr:{request.per_node}:node"]
            for name in names:
                words += ["-x", name]
            words += program.command
            begin += ranks
        return words

    def _hydra_words(self, added: Mapping[str, str], names: Sequence[str]) -> list[str]:
        words = list[str]()
        if self.places is not None:
            words += ["-hosts", _spelled(self.places)]
        elif self.request.per_node is not None and self.several_hosts:
            words += ["-ppn", str(self.request.per_node)]
        if self.several_hosts:
            # Hydra passes on its environment by default. These variables must arrive whatever the default of the site is.
            for name in sorted(set(names) & set(added)):
                words += ["-genv", name, added[name]]
        for i, (program, ranks) in enumerate(zip(self.programs, self.counts, strict=True)):
            words += [*([":"] if i else []), "-n", str(ranks), *program.command]
        return words


def _spelled(places: Sequence[str]) -> str:
    return ",".join(f"{host}:{count}" for host, count in Counter(places).items())


# --- how many ranks, and where ----------------------------------------------------------------------------------------


def _hosts(programs: Sequence[Program], site: Site, request: Request) -> tuple[Host, ...] | None:
    """The hosts that mpiexec is told; None: all ranks are here, or it knows them. Note [Who reads the allocation]."""
    allocated = () if site.allocation is None else tuple(Host(*node) for node in site.allocation.nodes)
    known, nodes = request.hosts or allocated, request.nodes
    if nodes is not None and not known and nodes > 1:
        raise LaunchError(
            f"--nnodes {nodes}: nothing says which nodes; name them with --host node1,node2 or --hostfile FILE, or start inside a"
            " job of a scheduler. mpicoll.run is started once, on one of them"
        )
    if nodes is not None and known and nodes > len(known):
        source = site.allocation if request.hosts is None else "the host list"
        raise LaunchError(f"--nnodes {nodes}: {source} has {len(known)}: {','.join(host.name for host in known)}")
    if request.hosts is not None or (nodes is not None and nodes < len(known)):
        return known[:nodes]
    if not known or site.reads_allocation or (len(known) == 1 and site.is_here(known[0].name.partition(".")[0])):
        return None
    if sum(program.ranks or 0 for program in programs) > sum(host.slots or 0 for host in known):
        return tuple(Host(host.name, None) for host in known)  # as under mpiexec of a site: slots are a default, not a limit
    return known


def _count(hosts: tuple[Host, ...] | None, site: Site, request: Request, notes: list[str]) -> int:
    """How many ranks there are, where the user has not said it."""
    allocation = site.allocation
    if request.per_node is not None:
        nodes: Sequence[object] = hosts or (() if allocation is None else allocation.nodes)
        return request.per_node * (len(nodes) or 1)
    ranks = site.cores
    if hosts is not None:
        ranks = sum(host.slots or 1 for host in hosts)
    elif allocation is not None:
        ranks = allocation.tasks
    if allocation is not None and request.hosts is None and (hosts is None or len(hosts) == len(allocation.nodes)):
        notes.append(f"{ranks} rank{'s' * (ranks > 1)}: the tasks of {allocation} (-n sets another number)")
    elif hosts is None:
        notes.append(f"{ranks} rank{'s' * (ranks > 1)}: one for each core that this process may use (-n sets another number)")
    if hosts is not None and any(host.slots is None for host in hosts):
        notes.append(f"{ranks} ranks: one for each host without a number (-n or --nproc-per-node sets another)")
    return ranks


def _places(hosts: Sequence[Host], ranks: int, per_node: int | None) -> list[str]:
    """The host of each rank: the hosts are filled in order."""
    alike = math.ceil(ranks / len(hosts)) if all(host.slots is None for host in hosts) else 1
    slots = [per_node or host.slots or alike for host in hosts]
    if sum(slots) < ranks:
        listed = ",".join(f"{host.name}:{n}" for host, n in zip(hosts, slots, strict=True))
        raise LaunchError(
            f"{ranks} ranks were asked for, but the hosts {listed} have {sum(slots)} places; raise the numbers of places, or"
            " lower -n"
        )
    return [host.name for host, offered in zip(hosts, slots, strict=True) for _ in range(offered)][:ranks]

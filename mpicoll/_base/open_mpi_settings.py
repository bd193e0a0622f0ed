"""The settings that mpicoll gives Open MPI, and those of the user in files, which no default of mpicoll overrides.

    setting                                   when                              why
    ALWAYS                                    any Open MPI                      see there
    FI_PROVIDER=^net                          Open MPI 4                        Note [The provider net] in _mpi/open_mpi.py
    OMPI_MCA_btl=^ofi, OMPI_MCA_osc=^ucx      Open MPI 5, all ranks on one      starts in 0.3 s, not 1.3, and without warnings;
                                              host                              several hosts may need both
    others                                    few cores, containers             binding.py, containers.py, _launch/plan.py

They take effect if they are in the environment when MPI starts. What comes first in a rank sets them: its start by
`mpicoll.run`, ``import torch``, or mpicoll before it starts MPI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from mpicoll._base import launcher
from mpicoll._base.cpus import read

# The first four: Open MPI writes no message past the end of its receive; Note [Messages that are too long] in _mpi/open_mpi.py
# says how and why.
ALWAYS = {
    "OMPI_MCA_smsc": "^cma,knem,xpmem",  # shared memory, Open MPI 5
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",  # the same, Open MPI 4
    "OMPI_MCA_btl_self_flags": "send,inplace",
    "OMPI_MCA_btl_tcp_flags": "send,inplace",
    # Pieces of a message (32 KiB in a node) that are under way at a time; Open MPI's default is 3. A rank that computes sends the
    # next ones when its poller looks again: 4 MiB took 32 ms (2 ranks on 2 cores), and take 3 ms.
    "OMPI_MCA_pml_ob1_send_pipeline_depth": "64",
}
OF_OPEN_MPI_4 = "OMPI_MCA_orte_ess_num_procs"  # its mpirun, and that of no later Open MPI, sets this for the ranks
LAUNCHERS = ("openmpi", "jsm", "pals", "flux", "slurm", "pmix")  # which may start ranks of Open MPI

NAME = "mca-params.conf"
FILES = ((".openmpi", "OMPI_MCA_"), (".prte", "PRTE_MCA_"), (".pmix", "PMIX_MCA_"))  # folder, prefix of the variables


def of_version(version: tuple[int, ...], one_host: bool) -> dict[str, str]:
    """The settings beside `ALWAYS` for this Open MPI."""
    if version[:1] < (5,):  # Open MPI 5 does without "net" by itself
        return {"FI_PROVIDER": "^net"}
    return {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_osc": "^ucx"} if one_host else {}


def provide(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets `ALWAYS`, and what Open MPI 4 needs, where they are unset, in a rank that a launcher of Open MPI may have started.

    For programs in which another package starts MPI before mpicoll does (MPIEnvironment of Lightning). Call it before MPI starts:
    afterwards the variables would describe settings that are not in force.
    """
    launch = launcher.detect(environ)
    if launch is not None and launch.launcher in LAUNCHERS:
        for name, value in ALWAYS.items():
            environ.setdefault(name, value)
        if OF_OPEN_MPI_4 in environ:
            from mpicoll._base.inherited import provide_here  # seldom needed

            for name, value in of_version((4,), one_host=False).items():
                if name not in environ:
                    provide_here(name, value, environ)


def decided(environ: Mapping[str, str], library: str = "") -> frozenset[str]:
    """The settings that the user or the site has decided in files, named as the environment variables that override them.

    Args:
        library: The libmpi, beside which the site's file is; empty: only the user's files count, also those of PRRTE.
    """
    home, prefix = environ.get("HOME", ""), os.path.dirname(os.path.dirname(os.path.realpath(library)))
    files = [(os.path.join(home, folder, NAME), variable) for folder, variable in FILES if home]
    if library:
        files.append((os.path.join(prefix, "etc", "openmpi-" + NAME), "OMPI_MCA_"))
    return frozenset().union(*(_names(path, variable) for path, variable in files))


def _names(path: str, prefix: str) -> frozenset[str]:
    return frozenset(prefix + name for name in re.findall(r"^\s*([A-Za-z0-9_]+)\s*=", read(path), re.MULTILINE))

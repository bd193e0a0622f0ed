"""Settings of Open MPI in files. They count as decided: no default of mpicoll overrides them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from mpicoll._base.cpus import read

NAME = "mca-params.conf"
FILES = ((".openmpi", "OMPI_MCA_"), (".prte", "PRTE_MCA_"), (".pmix", "PMIX_MCA_"))  # folder, prefix of the variables


def names(environ: Mapping[str, str]) -> frozenset[str]:
    """Settings in the files of the user for Open MPI and PRRTE, named as the environment variables that override them."""
    home = environ.get("HOME", "")
    return frozenset().union(*(_names(os.path.join(home, folder, NAME), prefix) for folder, prefix in FILES if home))


def site_names(library: str) -> frozenset[str]:
    """The same in the site's file for the Open MPI with this libmpi."""
    folder = os.path.dirname(os.path.dirname(os.path.realpath(library)))
    return _names(os.path.join(folder, "etc", "openmpi-" + NAME), "OMPI_MCA_")


def _names(path: str, prefix: str) -> frozenset[str]:
    return frozenset(prefix + name for name in re.findall(r"^\s*([A-Za-z0-9_]+)\s*=", read(path), re.MULTILINE))

"""One command for contributors: ``nox`` runs what a change must pass on most days, ``nox -l`` lists the sessions.

    nox -s lint
    nox -s openmpi -- 1 3       the tests on 1 and on 3 ranks

A session runs the part of .ci/run that has its name. The parts make virtual environments of their own; here they are kept in
.nox and used again. ``bash .ci/run`` runs all parts, from nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "docs", "openmpi"]

ENVIRONMENTS = Path(__file__).parent / ".nox" / "environments"


def run(session: nox.Session) -> None:
    """Runs the part of .ci/run that is named as the session is, with the words after ``--``."""
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    variables = {"MPICOLL_CI_ENVS": os.environ.get("MPICOLL_CI_ENVS", str(ENVIRONMENTS))}
    session.run("bash", ".ci/run", session.name, *session.posargs, env=variables, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Checks the form and the types of the code."""
    run(session)


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation in build/docs; a link that leads nowhere is an error."""
    run(session)


@nox.session
def openmpi(session: nox.Session) -> None:
    """Runs the tests with Open MPI; `-- 1 3`: on 1 and on 3 ranks."""
    run(session)


@nox.session
def mpich(session: nox.Session) -> None:
    """Runs the tests with MPICH; `-- 1 3`: on 1 and on 3 ranks."""
    run(session)


@nox.session
def package(session: nox.Session) -> None:
    """Builds sdist and wheel, checks their content, and installs the sdist where nothing else is."""
    run(session)


@nox.session
def slow(session: nox.Session) -> None:
    """Runs the tests marked slow, and some as if there were GPUs."""
    run(session)


@nox.session
def cluster(session: nox.Session) -> None:
    """Runs jobs of a real Slurm and over ssh on hosts made of namespaces, with both MPIs; needs root."""
    run(session)


@nox.session
def companions(session: nox.Session) -> None:
    """Runs programs of other packages (Lightning, DeepSpeed, ...), which it installs; `-- mpich`: with MPICH."""
    run(session)


@nox.session
def newest(session: nox.Session) -> None:
    """Runs the tests with the newest torch, which may bring several gigabytes; `-- 2`: on 2 ranks."""
    run(session)

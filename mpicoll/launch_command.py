"""The words of each mpiexec: a planned job as a command line of Open MPI's mpiexec or of Hydra. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpicoll.errors import LaunchError
from mpicoll.launch_job import Placement, Program, Where

Counted = Sequence[tuple[Program, int]]
Placements = Sequence[Placement | None]


def openmpi_command(
    counted: Counted, placements: Placements, added: Mapping[str, str], names: Sequence[str], where: Where
) -> list[str]:
    words: list[str] = []
    for (program, ranks), placement in zip(counted, placements, strict=True):
        words += [":"] if words else []
        words += ["-n", str(ranks)]
        if placement is not None:
            words += ["--host", ",".join(f"{host}:{count}" for host, count in placement)]
        elif program.per_node is not None and where.several_hosts:
            words += ["--map-by", f"ppr:{program.per_node}:node"]
        for name in names:
            words += ["-x", name]
        words += program.words("openmpi")
    return words


def hydra_command(
    counted: Counted, placements: Placements, added: Mapping[str, str], names: Sequence[str], where: Where
) -> list[str]:
    words: list[str] = []
    placed = [item for placement in placements for item in placement or ()]
    if placed:
        words += ["-hosts", ",".join(f"{host}:{count}" for host, count in _adjacent(placed))]
    elif counted[0][0].per_node is not None and where.several_hosts:
        words += ["-ppn", str(counted[0][0].per_node)]
    if where.several_hosts:
        for name in sorted(
            set(names) & set(added)
        ):  # Hydra hands on everything it was given; these it must not lose whatever the site's default
            words += ["-genv", name, added[name]]
    for i, (program, ranks) in enumerate(counted):
        words += [":"] if i else []
        words += ["-n", str(ranks), *program.words("mpich")]
    return words


def _adjacent(placed: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The hosts in rank order, each once. Raises LaunchError: the ranks come back to a host, which Hydra's host list
    cannot say.
    """
    hosts: list[tuple[str, int]] = []
    for host, count in placed:
        if hosts and hosts[-1][0] == host:
            hosts[-1] = (host, hosts[-1][1] + count)
        elif any(host == other for other, _ in hosts):
            raise LaunchError(
                f"MPICH's mpiexec cannot return to host {host} after another host; put the programs that run on {host}"
                " next to each other"
            )
        else:
            hosts.append((host, count))
    return hosts

"""Compares the event loop of model.py with SimGrid's replay of the same schedules: ``python -m benchmarks.simgrid``.

It writes time-independent traces (one file for each rank), a fat tree and a dragonfly with the cards of "InfiniBand
100 Gbit/s", and runs smpirun (Debian: libsimgrid-dev 3.32). SimGrid shares each link between the messages that are on it, and
knows the links between switches; the loop lets the messages of a card pass one after the other, and knows no other links.

SimGrid's time divided by that of the loop, on the fat tree and on the dragonfly (SimGrid 3.32):

    all_reduce, reduce, reduce_scatter, all_gather, all_to_all, 16 nodes, 1 MiB    1.01 to 1.03; 1.03 to 1.05
    the same on 64 nodes                                                           0.98 to 1.00; 0.98 to 1.00
    all_reduce, 16 nodes, 16 MiB                                                   1.01; 1.01
    broadcast, 16 nodes, 1 MiB; 4 MiB          1.06, 1.09; 1.30, 1.30: pieces share a card and come later
    broadcast, 48 nodes, 4 MiB; 64, 1 MiB      1.02, 1.00; 1.22, 1.22: the same
    all_to_all, 4 x 4, 2 KiB; 16 x 4, 1 MiB; 64 x 4, 2 KiB                         1.00, 1.00; 1.04, 1.06; 1.00, 1.00
    Rabenseifner's all_reduce, 256 nodes, 16 MiB; a ring, 64 nodes, 1 MiB          1.00, 1.09; 0.91, 0.85
    recursive doubling of MPI, 256 nodes, 1 MiB                                    1.00, 2.97: 64 nodes share 4 links to a group

Covered is what consists of messages alone: one rank on each node, and all_to_all. An exchange among p ranks has p (p - 1)
messages, and SimGrid shares the cards anew whenever one begins or ends. On a loaded machine all_gather on 128 nodes took 24 s; a
broadcast, whose messages begin one after the other, took 33 s on 64 nodes and 519 s on 128. Larger ones are left out.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import model
from benchmarks.model import KIB, MIB, NETWORKS, STEP, Round, of_record
from mpicoll._host.algorithm_choice import WINDOW_FROM, Choices
from tests.host.recorder import OPERATIONS, Job

NETWORK = NETWORKS["InfiniBand 100 Gbit/s"]
ALWAYS = {name: {2: 1} for name in WINDOW_FROM}
OWN = Choices(window_from=ALWAYS, between_from=ALWAYS, apart_from=ALWAYS)
FLOPS = 1e9  # of a host in a second
BYTE = 6  # SimGrid's number of MPI_BYTE
# Hosts, levels and links of the two networks. 256 hosts; a path has 4 links in the tree, and up to 5 in the dragonfly.
TOPOLOGIES = {"FAT_TREE": ("2;16,16;1,16;1,1", 4), "DRAGONFLY": ("4,4;4,4;4,4;4", 5)}
PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="c" prefix="n" suffix="" radical="0-255" speed="{speed}f" core="{cores}" bw="{bandwidth}Bps" lat="{latency}s"
    topology="{topology}" topo_parameters="{parameters}" sharing_policy="SPLITDUPLEX"
    loopback_bw="{loopback}Bps" loopback_lat="{near}s"/>
</platform>
"""
# No factors for TCP: the latencies and bandwidths are those of the platform. Only long messages wait for their receive.
SETTINGS = ("network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0")


def of_mpicoll(job: Job, operation: str, nbytes: int) -> Iterator[Iterator[str]]:
    """The actions of each rank of a schedule that is made of messages."""
    for record in job.record(operation, nbytes).of.values():
        yield _actions(of_record(record, job, NETWORK, alone=False))


def _actions(program: model.Program) -> Iterator[str]:
    """SimGrid's words for the operations of a rank. A message's tag is its number among those of the pair."""
    sent = Counter[tuple[int, int]]()
    tags: dict[int, tuple[int, int, int]] = {}
    for kind, *of in program:
        if kind == "busy":
            yield f"compute {of[0] * FLOPS:.0f}"
        elif kind == "send":
            number, (_, source, target), nbytes = of[:3]
            tags[number] = source, target, sent[source, target]
            sent[source, target] += 1
            yield f"isend {target} {tags[number][2]} {nbytes} {BYTE}"
        elif kind == "receive":
            (_, source, target), index = of
            yield f"irecv {source} {index} {4 * MIB} {BYTE}"
        elif kind == "sent":
            source, target, tag = tags[of[0]]
            yield f"wait {source} {target} {tag}"
        elif kind == "await" and of[0][0] != "collective":
            (_, source, target), index = of
            yield f"wait {source} {target} {index}"


def of_rounds(rounds: list[Round], size: int) -> Iterator[Iterator[str]]:
    """The actions of each rank of an algorithm of MPI, one rank on each node."""

    def actions(rank: int) -> Iterator[str]:
        tag = 0
        for distance, nbytes, reduced, _, times, around in rounds:
            to, source = ((rank + 1) % size, (rank - 1) % size) if around else (rank ^ distance, rank ^ distance)
            for _ in range(times if distance else 0):
                yield f"irecv {source} {tag} {int(nbytes)} {BYTE}"
                yield f"compute {NETWORK.overhead * FLOPS:.0f}"
                yield f"isend {to} {tag} {int(nbytes)} {BYTE}"
                yield f"wait {source} {rank} {tag}"
                yield f"wait {rank} {to} {tag}"
                yield f"compute {(NETWORK.overhead + model.reduction(reduced, model.CORE)) * FLOPS:.0f}"
                tag += 1

    return map(actions, range(size))


def replayed(ranks: Iterable[Iterator[str]], topology: str, ranks_per_node: int) -> float:
    """Returns SimGrid's seconds."""
    parameters, links = TOPOLOGIES[topology]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        traces = []
        for rank, actions in enumerate(ranks):
            traces.append(home / f"{rank}.txt")
            lines = (f"{rank} {action}\n" for action in ("init", *actions, "finalize"))
            traces[-1].write_text("".join(lines))
        (home / "traces").write_text("".join(f"{path}\n" for path in traces))
        (home / "hosts").write_text("".join(f"n{rank // ranks_per_node}\n" for rank in range(len(traces))))
        (home / "platform.xml").write_text(
            PLATFORM.format(
                speed=FLOPS,
                cores=ranks_per_node,
                bandwidth=1 / NETWORK.per_byte,
                latency=NETWORK.latency / links,
                topology=topology,
                parameters=parameters,
                loopback=model.copied_per_second(ranks_per_node) / 2,
                near=STEP,
            )
        )
        command = ["smpirun", "-np", str(len(traces)), "-platform", "platform.xml", "-hostfile", "hosts", "-replay", "traces"]
        done = subprocess.run([*command, *(f"--cfg={each}" for each in SETTINGS)], cwd=home, text=True, capture_output=True)
        found = re.search(r"Simulation time ([0-9.e+-]+)", done.stderr + done.stdout)
        assert found is not None, done.stderr[-2000:]
        return float(found[1])


def main() -> None:
    print(f"{'':44} loop, us; SimGrid / loop: {', '.join(TOPOLOGIES)}")
    for operation, nodes, per_node, nbytes in (
        *((name, nodes, 1, MIB) for name in OPERATIONS if name != "gather" for nodes in (16, 64)),
        ("all_reduce", 16, 1, 16 * MIB),
        *(("broadcast", nodes, 1, 4 * MIB) for nodes in (16, 48)),
        *(("all_to_all", ranks // 4, 4, ranks * nbytes) for ranks, nbytes in ((16, 128), (64, 16 * KIB), (256, 8))),
    ):
        job = Job(nodes * per_node, per_node, OWN)
        seconds = model.played(job, operation, nbytes, every_rank=True)(NETWORK)
        others = [replayed(of_mpicoll(job, operation, nbytes), each, per_node) / seconds for each in TOPOLOGIES]
        _print(f"{operation}, {nodes} x {per_node}, {nbytes >> 10} KiB", seconds, others)
    mpis = ((0, "allreduce", 256, MIB), (1, "allreduce", 256, 16 * MIB), (1, "allgather", 64, MIB))
    for place, name, size, nbytes in mpis:
        rounds = model.TEXTBOOK[name](size, nbytes, 1)[place]
        seconds = model.run({0: model.of_rounds(rounds, size, 1, 1, NETWORK)}, NETWORK, model.copied_per_second(1))
        others = [replayed(of_rounds(rounds, size), each, 1) / seconds for each in TOPOLOGIES]
        _print(f"MPI {name}, {len(rounds)} kinds of rounds, {size} x 1, {nbytes >> 10} KiB", seconds, others)


def _print(what: str, seconds: float, others: list[float]) -> None:
    print(f"{what:44} {1e6 * seconds:9.0f}", *(f"{x:6.2f}" for x in others), flush=True)


if __name__ == "__main__":
    main()

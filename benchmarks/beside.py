"""Times this tree beside another one: has a change made an operation slower?

    git worktree add ../before COMMIT
    python -m benchmarks.beside ../before --rounds 5

Jobs of the two trees alternate, each with the MPI of this environment and 2 ranks. For each operation it prints the least time in
each tree, in microseconds per call, and their ratio. A ratio below 1: this tree is faster. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mpicoll.bench import options
from tests.support import ROOT, run

PROGRAM = Path(__file__).resolve().parent / "times.py"
JOB_S = 120.0  # limit


def compare(before: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """The least microseconds of (this tree, the other one) by operation."""
    least: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        current, previous = job(ROOT), job(before)
        for name in current.keys() & previous.keys():
            a, b = least.get(name, (float("inf"), float("inf")))
            least[name] = min(a, current[name]), min(b, previous[name])
    return {name: least[name] for name in current if name in least}


def job(tree: Path) -> dict[str, float]:
    """Microseconds of each operation in one job that imports mpicoll from ``tree``."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        command = [sys.executable, "-m", "mpicoll.run", "-n", "2", str(PROGRAM), str(output)]
        done = run(command, JOB_S, cwd=tree, env={"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(f"{tree}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        facts = json.loads(output.read_text())
    if not Path(facts["from"]).is_relative_to(tree):
        raise SystemExit(f"{tree}: the job imported mpicoll from {facts['from']}")
    return dict(facts["times"])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path, help="folder of the other tree")
    parser.add_argument("--rounds", type=options.count, default=5, metavar="N", help="jobs of each tree; default 5")
    args = parser.parse_args(words)
    if not (args.before / "mpicoll").is_dir():
        parser.error("name a folder that holds another tree of mpicoll")
    print(f"{'operation':48}{'here':>10}{'before':>10}{'ratio':>8}")
    for name, (current, previous) in compare(args.before.resolve(), args.rounds).items():
        print(f"{name:48}{current:10.1f}{previous:10.1f}{current / previous:8.2f}")


if __name__ == "__main__":
    main()

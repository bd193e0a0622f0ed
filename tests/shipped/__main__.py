"""``python -m tests.shipped [SUITE...] [-n RANKS]``: torch's suites, each in a job of its own, and a table of their outcomes."""

import argparse
import os
import subprocess
import sys
import time

from tests.shipped.suites import SUITES, Suite

# Some tests call a rank as soon as they have made a group with it: torch then waits until every rank has come out of
# init_process_group. Groups that name Gloo are mpicoll's, too.
ENVIRONMENT = {"TORCH_DIST_INIT_BARRIER": "1", "MPICOLL_REPLACE_GLOO": "1"}
LIMIT_S = 1500  # of one job; DistributedTest takes 120 on two cores


def run(suite: Suite, ranks: int) -> str:
    """What became of one suite: "ok", or the reason why it is not."""
    command = [sys.executable, "-m", "mpicoll.run", "-n", str(ranks), "-m", "pytest", "--shipped", "-q", "-rs", "--tb=short"]
    try:
        which = ["tests/shipped", "-k", f"test_of_torch[{suite.short}-"]
        done = subprocess.run([*command, *which], env={**os.environ, **ENVIRONMENT}, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT_S} s"
    return "ok" if done.returncode == 0 else f"exit status {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.shipped", description="The tests that PyTorch ships, over mpicoll.")
    parser.add_argument("suites", nargs="*", choices=[*(suite.short for suite in SUITES), []], metavar="SUITE")
    parser.add_argument("-n", type=int, metavar="RANKS", help="number of ranks, where a suite does not need another")
    options = parser.parse_args()
    table = []
    for suite in SUITES:
        if options.suites and suite.short not in options.suites:
            continue
        for ranks in suite.ranks if suite.fixed or options.n is None else (options.n,):
            began = time.monotonic()
            table.append((suite.short, ranks, run(suite, ranks), time.monotonic() - began))
    for name, ranks, outcome, took in table:
        print(f"{name:36} {ranks} ranks {took:6.0f} s  {outcome}")
    return int(any(outcome != "ok" for _, _, outcome, _ in table))


if __name__ == "__main__":
    sys.exit(main())

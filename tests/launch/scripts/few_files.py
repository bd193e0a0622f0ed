"""few_files.py SOFT HARD RANKS: the reports of a supervisor under limits of open files, until a rank fails.

Prints the port; then the number of ranks that it knows, whether it knows of the failure, and whether it rested meanwhile.
"""

import resource
import selectors
import sys
import time

from mpicoll._launch.reports import Reports

soft, hard, ranks = map(int, sys.argv[1:])
with selectors.DefaultSelector() as selector:
    reports = Reports(selector, "127.0.0.1", "5ec2e7")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(reports.port, flush=True)
    turns, deadline = 0, time.monotonic() + 20
    while (ready := selector.select(0.5)) or not reports.failed():
        if time.monotonic() > deadline:
            break
        turns += 1
        for key, _ in ready:
            key.data()
    print(len(reports.ranks), reports.failed(), turns < 20 * ranks, flush=True)
    reports.close()

"""Makes a rank of ``mpicoll.run`` a client of the warm server, where this folder is in PYTHONPATH: Python runs this file first.

So the command of the rank is the one that users have. warm.py says what the client does, and which processes stay fresh.
"""

import os
import sys

RANK = ["-u", "-m", "mpicoll._launch.rank"]  # the beginning of its command, after the name of Python

if sys.orig_argv[1:4] == RANK and "TESTS_WARM_SERVER" in os.environ:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import warm

    del sys.path[0]
    if warm.fits():
        warm.client(sys.orig_argv[2:])

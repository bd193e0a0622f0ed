"""``python -m mpicoll.doctor``: what this machine has, and what is missing; see `mpicoll._launch.doctor.checks`."""

import sys

from mpicoll._launch.doctor.checks import main

if __name__ == "__main__":
    sys.exit(main())

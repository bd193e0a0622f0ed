"""``python -m mpicoll.doctor``: what this machine has, and what is missing; see `mpicoll._doctor.doctor`."""

import sys

from mpicoll._doctor.doctor import main

if __name__ == "__main__":
    sys.exit(main())

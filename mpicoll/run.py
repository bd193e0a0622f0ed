"""``python -m mpicoll.run -n 4 train.py``: starts a program on N ranks; see `mpicoll._launch.run`."""

import sys

from mpicoll._launch.run import main

if __name__ == "__main__":
    sys.exit(main())

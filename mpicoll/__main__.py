"""``python -m mpicoll``: the command ``mpicoll``."""

import sys

from mpicoll._cli import main

if __name__ == "__main__":
    sys.exit(main())

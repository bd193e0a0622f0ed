"""``python -m tests.companions.notebook NOTEBOOK`` runs a notebook, and writes its outputs anew; with a path: to that file."""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

CELL_S = 120  # seconds for one cell


def execute(notebook: Path, path: Path) -> None:
    """Runs the notebook in a kernel of this Python, and writes it with what it prints to ``path``."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # the kernel would not show what the ranks print: ipykernel/iostream.py
    book = nbformat.read(notebook, as_version=4)
    NotebookClient(book, timeout=CELL_S, kernel_name="python3", record_timing=False).execute()
    del book.metadata["language_info"]  # the version of this Python
    nbformat.write(book, path)


if __name__ == "__main__":
    execute(Path(sys.argv[1]), Path(sys.argv[-1]))

"""What an example says that it prints."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path


def output_of(path: Path) -> list[str]:
    """The lines of the last block of the docstring, which begins with "Output"; none if there is no such block."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    before, _, block = docstring.rpartition(":\n\n")
    announced = before.splitlines()[-1:]
    return textwrap.dedent(block).splitlines() if announced and announced[0].startswith("Output ") else []

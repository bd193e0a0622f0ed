"""Tables of documentation pages that a command makes from measured figures.

A page has the table between two lines, ``<!-- NAME -->`` and ``<!-- /NAME -->``. The figures lie in a JSON file beside the pages.
"""

import json
from pathlib import Path
from typing import Any


def figures(path: Path) -> dict[str, Any]:
    """What the file holds; empty if there is none yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def shown(page: Path, name: str) -> str:
    """The table that stands in the page."""
    begin, end = _extent(page.read_text(), name)
    return page.read_text()[begin:end]


def publish(page: Path, name: str, table: str, path: Path, figures: dict[str, Any]) -> None:
    """Writes the table into the page, and its figures into their file."""
    path.write_text(json.dumps(figures, indent=1) + "\n")
    put(page, name, table)


def put(page: Path, name: str, table: str) -> None:
    """Writes the table into the page."""
    text = page.read_text()
    begin, end = _extent(text, name)
    page.write_text(text[:begin] + table + text[end:])


def _extent(text: str, name: str) -> tuple[int, int]:
    opening = f"<!-- {name} -->\n"
    return text.index(opening) + len(opening), text.index(f"<!-- /{name} -->\n")

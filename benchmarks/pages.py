"""Tables of documentation pages that a command makes from measured figures.

A page has the table between two lines, ``<!-- NAME -->`` and ``<!-- /NAME -->``.
"""

from pathlib import Path


def shown(page: Path, name: str) -> str:
    """The table that stands in the page."""
    begin, end = _extent(page.read_text(), name)
    return page.read_text()[begin:end]


def put(page: Path, name: str, table: str) -> None:
    """Writes the table into the page."""
    text = page.read_text()
    begin, end = _extent(text, name)
    page.write_text(text[:begin] + table + text[end:])


def _extent(text: str, name: str) -> tuple[int, int]:
    opening = f"<!-- {name} -->\n"
    return text.index(opening) + len(opening), text.index(f"<!-- /{name} -->\n")

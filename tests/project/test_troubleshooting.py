"""docs/troubleshooting.md quotes messages word by word: what it quotes stands in the source of mpicoll, or of torch.

A quoted message is a ```text block. "..." stands for text that is left out; numbers, paths and names are examples. Messages of
torch follow the comment <!-- torch -->. Those of MPI and of the resolver follow <!-- other -->; their sources are not here.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch.distributed

from mpicoll import errors
from tests.project.sources import MODULES
from tests.support import ROOT

PAGE = ROOT / "docs/troubleshooting.md"
QUOTE = re.compile(r"^(?:<!-- (\w+) -->\n)?```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PREFIX = re.compile(r"(?:mpicoll(?:\.run)?|(?:note|FAIL) [\w ]+|(?P<error>[A-Z]\w+)): ")  # what printed the text
PHRASE = 12  # characters that do not stand in a row in the source by chance
EDGE = " ;:,.()'"  # punctuation at the ends of a phrase
VALUE = re.compile(r".*[\d/_=].*|--.*|\w+\.py:")  # numbers, paths, options, names of operations and hosts
NAMES = {
    "Open", "MPI", "InfiniBand", "openmpi", "hydra", "srun", "none", "gloo", "broadcast", "recv", "src", "BAND", "SIGKILL",
    "ValueError",
}  # fmt: skip


def literals(path: Path) -> Iterator[str]:
    """The texts of a file, without docstrings; of an f-string, the pieces between its values."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield " ".join(f"<{node.value}>".split())[1:-1]


class Corpus:
    """All texts of some files."""

    def __init__(self, paths: Iterable[Path]) -> None:
        pieces = [piece for path in paths for piece in literals(path)]
        self.text = "\n".join(pieces)
        self.pieces = {piece.strip(EDGE) for piece in pieces}

    def has(self, words: str) -> bool:
        words = words.strip(EDGE)
        return words in self.pieces or (len(words) >= PHRASE and words in self.text)

    def foreign(self, message: str) -> list[str]:
        """The words of ``message`` that are no values and belong to no phrase of the files."""
        found = []
        for part in message.split("..."):
            words = part.split()
            while words:
                known = next((n for n in range(len(words), 0, -1) if self.has(" ".join(words[:n]))), 0)
                if not known and not VALUE.match(words[0]) and words[0].strip(EDGE) not in NAMES:
                    found.append(words[0])
                words = words[known or 1 :]
        return found


@cache
def corpus(origin: str) -> Corpus:
    return Corpus(sorted(Path(torch.distributed.__file__).parent.glob("*.py")) if origin == "torch" else MODULES)


def quotes() -> list[tuple[str, str]]:
    """Origin (torch, other; empty: mpicoll) and text of each message of the page."""
    return [(origin or "", " ".join(text.split())) for origin, text in re.findall(QUOTE, PAGE.read_text())]


@pytest.mark.parametrize(("origin", "message"), [quote for quote in quotes() if quote[0] != "other"])
def test_a_quoted_message_stands_in_the_source(origin: str, message: str) -> None:
    prefix = PREFIX.match(message)
    if prefix is not None:
        name = prefix["error"]
        assert name is None or name in errors.__all__ or hasattr(builtins, name), f"there is no {name}"
        message = message[prefix.end() :]
    assert corpus(origin).foreign(message) == []


def test_quotes_are_found() -> None:
    origins = [origin for origin, _ in quotes()]
    assert origins.count("") > 40
    assert set(origins) == {"", "torch", "other"}


def test_a_message_that_is_worded_otherwise_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""ranks were asked for."""\nprint(f"{n} ranks were asked for, but there are {m} places" " only")\n')
    texts = Corpus([file])
    assert texts.foreign("8 ranks were asked for, but there are 4 places only") == []
    assert texts.foreign("8 ranks were asked for, ... places only") == []
    assert texts.foreign("8 ranks were wanted, but there are 4 places only") == ["ranks", "were", "wanted,"]

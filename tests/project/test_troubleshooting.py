"""The messages that docs/troubleshooting.md quotes, in ```text blocks, stand in the source of mpicoll, or of torch.

"..." stands for text that is left out; numbers, paths and names are examples. Messages of torch follow the comment
<!-- torch -->. Those of MPI and of the resolver follow <!-- other -->; their sources are not here.
"""

from __future__ import annotations

import ast
import builtins
import re
from functools import cache
from pathlib import Path

import pytest
import torch.distributed

from mpicoll import errors
from tests.project.sources import MODULES
from tests.support import ROOT

QUOTE = re.compile(r"^(?:<!-- (\w+) -->\n)?```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTES = [(origin, " ".join(text.split())) for origin, text in QUOTE.findall((ROOT / "docs/troubleshooting.md").read_text())]
PREFIX = re.compile(r"(?:mpicoll(?:\.run)?|(?:note|FAIL) [\w ]+|(?P<error>[A-Z]\w+)): ")  # what printed the text
PHRASE = 12  # characters that do not stand in a row in the source by chance
EDGE = " ;:,.()'"  # punctuation at the ends of a phrase
VALUE = re.compile(r".*[\d/_=].*|--.*|\w+\.py:")  # numbers, paths, options, names of operations and hosts
NAMES = {
    "Open", "MPI", "InfiniBand", "openmpi", "hydra", "srun", "none", "gloo", "broadcast", "recv", "src", "BAND", "SIGKILL",
    "ValueError",
}  # fmt: skip


@cache
def texts(origin: str) -> list[str]:
    """The texts of the source without docstrings; of an f-string, the pieces between its values."""
    files = Path(torch.distributed.__file__).parent.glob("*.py") if origin == "torch" else MODULES
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [" ".join(value.split()).strip(EDGE) for value in constants if isinstance(value, str)]


def stands_there(words: str, origin: str) -> bool:
    words = words.strip(EDGE)
    return any(words == text or (len(words) >= PHRASE and words in text) for text in texts(origin))


@pytest.mark.parametrize(("origin", "message"), [quote for quote in QUOTES if quote[0] != "other"])
def test_a_quoted_message_stands_in_the_source(origin: str, message: str) -> None:
    prefix = PREFIX.match(message)
    error = prefix and prefix["error"]
    assert error is None or error in errors.__all__ or hasattr(builtins, error), f"there is no {error}"
    foreign = []
    for part in message[prefix.end() if prefix else 0 :].split("..."):
        words = part.split()
        while words:
            known = next((n for n in range(len(words), 0, -1) if stands_there(" ".join(words[:n]), origin)), 0)
            if not known and not VALUE.match(words[0]) and words[0].strip(EDGE) not in NAMES:
                foreign.append(words[0])
            words = words[known or 1 :]
    assert not foreign, f"no phrase of the source has these words of the message: {foreign}"


def test_quotes_are_found() -> None:
    """In another notation none would be found, and all would pass."""
    assert len([origin for origin, _ in QUOTES if not origin]) > 40

"""Host lists in the syntax of Open MPI (``h1 slots=2``) or MPICH (``h1:2``). Resolves no names.

# a comment                     everything after a # is ignored
node01 slots=4                  Open MPI; also max_slots=4, max-slots=4
node02:4                        MPICH
node03                          without a number: -n or --nproc-per-node decide
node01                          repeated: the numbers are added (PBS writes one line per rank)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HOST = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.\-]*)(:(?P<slots>\d+))?")
KEYS = ("slots", "max_slots")  # the first one that is given counts


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it may run; None: the list does not say."""

    name: str
    slots: int | None


def read(path: str) -> tuple[Host, ...]:
    """The hosts of the file at ``path``. Raises ValueError for a malformed line or no host, OSError if it cannot be read."""
    return parse(Path(path).read_text(), path)


def parse(text: str, source: str = "hostfile") -> tuple[Host, ...]:
    """The hosts in a hostfile's text, in order. Raises ValueError naming ``source`` and the line."""
    lines = enumerate((line.partition("#")[0].split() for line in text.splitlines()), 1)
    hosts = [_host(words, f"{source}, line {number}") for number, words in lines if words]
    if not hosts:
        raise ValueError(f"{source} names no host; write one a line, `node01 slots=4` or `node01:4`")
    return merge(hosts)


def parse_list(text: str) -> tuple[Host, ...]:
    """The hosts of ``"a,b"`` or ``"a:2,b:2"``."""
    return merge(_host([item.strip()], f"--host {text}") for item in text.split(","))


def merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Each host once, at its first position. Numbers are added; a repeated host without a number counts one per line."""
    slots_by_name: dict[str, list[int | None]] = {}
    for host in hosts:
        slots_by_name.setdefault(host.name, []).append(host.slots)
    return tuple(
        Host(name, slots[0] if len(slots) == 1 else sum(1 if n is None else n for n in slots))
        for name, slots in slots_by_name.items()
    )


def _host(words: list[str], where: str) -> Host:
    match = HOST.fullmatch(words[0])
    if not match:
        raise ValueError(f"{where}: {words[0]!r} is no host; write `node01`, `node01:4` or `node01 slots=4`")
    numbers = {"slots": int(match["slots"])} if match["slots"] else dict[str, int]()
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or not value.isdigit() or key.replace("-", "_") not in KEYS:
            raise ValueError(
                f"{where}: {word!r} is not understood; a host may be followed by slots=N and max_slots=N only (user"
                " names and ports belong in ~/.ssh/config)"
            )
        numbers[key.replace("-", "_")] = int(value)
    slots = numbers.get("slots", numbers.get("max_slots"))
    if slots == 0:
        raise ValueError(f"{where}: host {match['name']} has 0 slots; leave the line out, or give it at least 1")
    return Host(match["name"], slots)

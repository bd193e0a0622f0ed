"""Reads the flight records that the ranks of a job have written; `_faults/flight_recorder.py` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpicoll._base.facts import Facts
from mpicoll._launch.doctor.report import Finding

VERSION = 1  # of the format
NAME = re.compile(r"rank-(\d+)\.json")


class GroupKey(NamedTuple):
    """What a group is called on all of its ranks. ``ranks``: global ranks, by group rank."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A collective that a rank has begun."""

    number: int
    facts: Facts
    started: float  # seconds since 1970
    ended: bool

    def __str__(self) -> str:
        return f"#{self.number} {self.facts}"


@dataclass(frozen=True)
class GroupRecord:
    """One group as one of its ranks saw it."""

    calls: dict[int, Call]  # by number, ascending
    error: str | None
    timeout_s: float
    queued: int  # collectives that the program has started, and that have not begun

    @property
    def last(self) -> Call | None:
        return next(reversed(self.calls.values()), None)


@dataclass(frozen=True)
class Record:
    """What one rank has written."""

    rank: int
    world_size: int
    host: str
    reason: str
    time: float  # seconds since 1970
    place: str | None  # the call of the program that the main thread is in
    groups: dict[GroupKey, GroupRecord]
    messages: list[Mapping[str, Any]]
    pending_messages: list[Mapping[str, Any]]


def read(folder: Path) -> tuple[dict[int, Record], list[Finding]]:
    """Returns the records by rank, and a finding for each file that cannot be read.

    Raises:
        ValueError: The folder does not exist, or no file in it is named like a record.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    files = sorted((int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name)))
    if not files:
        raise ValueError(f"{folder} holds no flight record: no file is named rank-R.json")
    records, findings = {}, []
    for rank, path in files:
        try:
            records[rank] = parse(rank, json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            findings.append(Finding("fail", "records", f"{path.name} cannot be read: {type(error).__name__}: {error}"))
    return records, findings


def parse(rank: int, written: Mapping[str, Any]) -> Record:
    """Returns the record in the content of a file. ValueError, KeyError or TypeError: it is none, or of another version."""
    if written["version"] != VERSION:
        raise ValueError(f"version {written['version']} of the format; this mpicoll reads version {VERSION}")
    if written["rank"] != rank:
        raise ValueError(f"it is the record of rank {written['rank']}")
    main: Mapping[str, Any] = next((thread for thread in written["threads"] if thread["main"]), {"at": None})
    return Record(
        rank, written["world_size"], written["host"], written["reason"], written["time"], main["at"],
        {GroupKey(group["name"], tuple(group["ranks"])): _group(group) for group in written["groups"]},
        written["messages"], written["pending_messages"],
    )  # fmt: skip


def _group(group: Mapping[str, Any]) -> GroupRecord:
    calls = [Call(each["number"], Facts.from_json(each), each["started"], each["ended"]) for each in group["collectives"]]
    queued = group["issued"] - (calls[-1].number if calls else 0)
    return GroupRecord({call.number: call for call in calls}, group["error"], group["timeout_s"], queued)

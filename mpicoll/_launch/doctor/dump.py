"""``mpicoll doctor dump FOLDER``: compares the flight records of a job's ranks, and says in words where the ranks part.

    mpicoll doctor dump flight           what differs, who has not come, who waits for whom
    mpicoll doctor dump flight --json    the report for programs

Exit status 0: the ranks agree; 1: they part, or a record is missing; 2: the command line is wrong, or there is no record.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpicoll._base.facts import Facts, difference, last_collective, ranks_in_words, what_differs
from mpicoll._base.waits import BLOCKED_S, PATIENCE_S
from mpicoll._launch.doctor.report import Finding, Report

VERSION = 1  # of the format
NAME = re.compile(r"rank-(\d+)\.json")
ONE_JOB_S = 60.0  # seconds between the records of one job


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Compares what the ranks of a job have called last, and says where they part."
    )
    parser.add_argument("folder", type=Path, help="holds rank-0.json, rank-1.json, ...: MPICOLL_DUMP_DIR, or mpicoll-dump")
    parser.add_argument("--json", action="store_true", help="print one JSON object: works, findings, facts")
    return parser


def main(argv: Sequence[str], prog: str) -> int:
    """Prints the report. Returns 0 if the ranks agree, else 1."""
    parser = make_parser(prog)
    options = parser.parse_args(argv)
    try:
        records, unreadable = read(options.folder)
        report = examine(records, unreadable)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(report.as_json() if options.json else report.as_text("the ranks agree", "wrong"), flush=True)
    return 0 if report.works else 1


def examine(records: Mapping[int, Record], unreadable: Sequence[Finding] = ()) -> Report:
    """Returns the report on these ranks' records."""
    report = Report([*unreadable], {"ranks": sorted(records), "missing": _missing(records)})
    if not records:
        return report
    report.findings += check_records(records)
    for key in sorted({key for record in records.values() for key in record.groups}):
        report.findings += check_group(key, records)
    for record in records.values():
        report.findings += check_messages(record, records)
    return report


def _missing(records: Mapping[int, Record]) -> list[int]:
    world_size = max((record.world_size for record in records.values()), default=0)
    return [rank for rank in range(world_size) if rank not in records]


def check_records(records: Mapping[int, Record]) -> list[Finding]:
    """Which ranks have written, when, and why."""
    ranks, by_time = sorted(records), sorted(records.values(), key=lambda record: record.time)
    first, last = by_time[0], by_time[-1]
    hosts = {record.host for record in records.values()}
    text = f"{ranks_in_words(ranks)} on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    reasons = tuple(sorted({record.reason for record in records.values()}))
    findings = [Finding("ok", "records", f"{text}; written because of", reasons)]
    sizes = sorted({record.world_size for record in records.values()})
    remedy = "empty the folder before each job"
    if len(sizes) > 1:
        return [*findings, Finding("fail", "records", f"of jobs of {' and '.join(map(str, sizes))} ranks", remedy=remedy)]
    if last.time - first.time > ONE_JOB_S:
        text = f"{ranks_in_words([first.rank])} wrote {last.time - first.time:.0f} s before rank {last.rank}: of an earlier job?"
        findings.append(Finding("note", "records", text, remedy=remedy))
    if missing := _missing(records):
        text = f"none from {ranks_in_words(missing)} (of {sizes[0]})"
        cause = "such a rank has ended, is stopped, cannot write here, or is in a call that keeps the interpreter lock of Python"
        findings.append(Finding("fail", "records", text, (cause,)))
    return findings


def check_group(key: GroupKey, records: Mapping[int, Record]) -> list[Finding]:
    """Where the ranks of a group diverge."""
    members = {rank: records[rank].groups[key] for rank in key.ranks if rank in records and key in records[rank].groups}
    if not members:
        return []  # a record of another job
    topic = f"group {key.name!r}"
    if key.ranks != tuple(range(records[next(iter(members))].world_size)):
        topic += f" of {ranks_in_words(key.ranks)}"
    findings = [
        Finding("fail", topic, f"unusable on rank {rank}: {group.error}") for rank, group in members.items() if group.error
    ]
    mismatch = _mismatch(topic, key, members)
    findings += mismatch
    findings += _waiting(topic, key, members, records, alike=not mismatch)
    if findings:
        return findings
    lasts = [group.last for group in members.values() if group.last is not None]
    furthest = max(lasts, key=lambda call: call.number, default=None)
    text = "no collective yet" if furthest is None else f"alike on {ranks_in_words(list(members))}, up to {furthest}"
    return [Finding("ok", topic, text)]


def _mismatch(topic: str, key: GroupKey, members: Mapping[int, GroupRecord]) -> list[Finding]:
    """The first collective that the ranks call in different ways."""
    for number in sorted({number for group in members.values() for number in group.calls}):
        calls = {key.ranks.index(rank): group.calls[number] for rank, group in members.items() if number in group.calls}
        made = {rank: call.facts for rank, call in calls.items()}
        if difference(made):
            ranks_by_call: dict[str, list[int]] = {}
            for rank, call in calls.items():
                ranks_by_call.setdefault(str(call.facts), []).append(key.ranks[rank])
            evidence = tuple(f"{ranks_in_words(ranks)}: {text}" for text, ranks in ranks_by_call.items())
            remedy = "start the program with MPICOLL_CHECK=1: every rank then raises at this call"
            return [Finding("fail", topic, f"collective #{number}: {what_differs(made)[0]}", evidence, remedy)]
    return []


def _waiting(
    topic: str, key: GroupKey, members: Mapping[int, GroupRecord], records: Mapping[int, Record], alike: bool
) -> Iterator[Finding]:
    """For each collective in which ranks wait: who waits, and who has not come. alike: all ranks call the same.

    A rank waits if it is in a call for `_patience_s`, or for the group's timeout if that is shorter.
    """
    waiting: dict[int, list[int]] = {}
    for rank, group in members.items():
        last = group.last
        if (
            last is not None
            and not last.ended
            and records[rank].time - last.started >= min(_patience_s(records), group.timeout_s)
        ):
            waiting.setdefault(last.number, []).append(rank)
    for number, ranks in sorted(waiting.items()):
        call = members[ranks[0]].calls[number]
        waited = max(records[rank].time - members[rank].calls[number].started for rank in ranks)
        absent = [rank for rank in key.ranks if rank in records and _last(members.get(rank)) < number]
        unknown = [rank for rank in key.ranks if rank not in records]
        text = f"{ranks_in_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {call} for {waited:.0f} s; "
        if absent:
            text += f"{ranks_in_words(absent)} {'has' if len(absent) == 1 else 'have'} not come"
        elif unknown:
            text += f"of {ranks_in_words(unknown)} there is no record"
        else:
            text += "every rank has come" + (": MPI, or the network, does not end it" if alike else "")
        evidence = [_position(rank, members.get(rank), records[rank]) for rank in [*absent, *ranks]]
        yield Finding("fail", topic, text, tuple(evidence))


def _last(group: GroupRecord | None) -> int:
    return 0 if group is None or group.last is None else group.last.number


def _position(rank: int, group: GroupRecord | None, record: Record) -> str:
    """What a rank did last on a group, and where its program is."""
    if group is None:
        done = "it has no such group (destroyed, or never made)"
    else:
        last = group.last
        lasted_s = None if last is None or last.ended else record.time - last.started
        done = last_collective(last.number if last else 0, last.facts if last else None, lasted_s)
        done += f", with {group.queued} more queued" if group.queued else ""
    return f"rank {rank}: {done}; its program is {_place(record)}"


def _place(record: Record) -> str:
    return "at its end, or outside Python" if record.place is None else f"at {record.place}"


def _patience_s(records: Mapping[int, Record]) -> float:
    """From when on a call counts as one that waits. A rank may know early that a call can never end."""
    return BLOCKED_S if any(record.expired for record in records.values()) else PATIENCE_S


def check_messages(record: Record, records: Mapping[int, Record]) -> list[Finding]:
    """Messages that a rank is blocked in, and those that it has posted."""
    findings = []
    timeouts_s = {key.name: group.timeout_s for key, group in record.groups.items()}
    for message in record.messages:
        waited = record.time - message["started"]
        if waited < min(_patience_s(records), timeouts_s.get(message["group"], PATIENCE_S)):
            continue
        peer = message["peer"]
        who = "any rank" if peer is None else f"rank {peer}"
        text = f"rank {record.rank} waits in {message['operation']} for {who} on group {message['group']!r} for {waited:.0f} s"
        evidence = [f"the program of rank {record.rank} is {_place(record)}"]
        if peer in records:
            evidence.append(f"the program of rank {peer} is {_place(records[peer])}")
        findings.append(Finding("fail", "messages", text, tuple(evidence)))
    if record.pending_messages:
        listed = [f"{each['operation']} of {each['nbytes']} bytes, {each['dtype']}, on group {each['group']!r}"
                  for each in record.pending_messages]  # fmt: skip
        text = f"rank {record.rank} has {len(listed)} under way that it does not wait for here"
        findings.append(Finding("note", "messages", text, tuple(listed[:10])))
    return findings


# --- the records, as `_faults/flight_recorder.py` writes them ----------------------------------------------------------


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
    expired: bool = False  # an operation has taken too long on this rank, or can never end


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
        written["messages"], written["pending_messages"], written.get("expired", False),
    )  # fmt: skip


def _group(group: Mapping[str, Any]) -> GroupRecord:
    calls = [Call(each["number"], Facts.from_json(each), each["started"], each["ended"]) for each in group["collectives"]]
    queued = group["issued"] - (calls[-1].number if calls else 0)
    return GroupRecord({call.number: call for call in calls}, group["error"], group["timeout_s"], queued)

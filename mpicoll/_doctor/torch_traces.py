"""Writes flight records as the traces that torch's analyser reads: ``torch.distributed.flight_recorder.fr_trace``.

The analyser of each torch since 2.11 has no name for MPI, and none for a few of our operations. Those get the name of the
operation of torch that moves the same data. The analyser knows no roots, no reductions, and no sizes that only two ranks know;
`dump.py` compares these.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpicoll._doctor.flight_records import Call, GroupKey, Record
from mpicoll._facts import Facts

VERSION = "2.10"  # of torch's format
BACKEND = "nccl"  # the analyser of torch 2.11 refuses most other names
NAMES = {
    "all_gather_single": "_all_gather_base",
    "all_gather_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_to_all_single": "all_to_all",
    "barrier": "all_reduce_barrier",
    "monitored_barrier": "all_reduce_barrier",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
UNKNOWN = [[0]]  # sizes that differ between ranks, which the analyser would call a mismatch
GATHERS, SCATTERS = ("all_gather", "_all_gather_base"), ("reduce_scatter", "_reduce_scatter_base")


def write(records: Mapping[int, Record], folder: Path) -> None:
    """Writes a file ``rankR`` for each record.

    Raises:
        ValueError: The folder holds other files, which the analyser would read too.
        OSError: The folder cannot be made, or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if others := {path.name for path in folder.iterdir()} - {f"rank{rank}" for rank in records}:
        raise ValueError(f"{folder} holds {sorted(others)[0]}, and the analyser reads every file; name an empty folder")
    first = _first_numbers(records)
    for rank, record in records.items():
        folder.joinpath(f"rank{rank}").write_bytes(pickle.dumps(trace(record, first)))


def _first_numbers(records: Mapping[int, Record]) -> dict[GroupKey, int]:
    """For each group, the first collective that all ranks have kept: the analyser takes an earlier one for a missing rank."""
    first: dict[GroupKey, int] = {}
    for record in records.values():
        for key, group in record.groups.items():
            first[key] = max(first.get(key, 0), next(iter(group.calls), 0))
    return first


def trace(record: Record, first: Mapping[GroupKey, int]) -> dict[str, Any]:
    """Returns a record as torch writes it, with the collectives from ``first`` on."""
    calls = [(key, call) for key, group in record.groups.items() for call in group.calls.values() if call.number >= first[key]]
    calls.sort(key=lambda each: each[1].started)
    return {
        "version": VERSION,
        "pg_config": {
            key.name: {"name": key.name, "desc": _description(key), "ranks": str(list(key.ranks))} for key in record.groups
        },
        "pg_status": {},
        "entries": [_entry(position, key, call, record) for position, (key, call) in enumerate(calls)],
    }


def _description(key: GroupKey) -> str:
    return "default_pg" if key.name == "0" else "undefined"


def _entry(position: int, key: GroupKey, call: Call, record: Record) -> dict[str, Any]:
    name, inputs, outputs = described(call.facts, len(key.ranks))
    dtypes = [part.dtype for part in call.facts.parts or (call.facts,)]
    started_ns, under_way = int(call.started * 1e9), not call.ended and not call.asynchronous
    return {
        "record_id": position, "pg_id": 0, "process_group": (key.name, _description(key)), "collective_seq_id": call.number,
        "p2p_seq_id": 0, "op_id": position, "profiling_name": f"{BACKEND}:{name}", "time_created_ns": started_ns,
        "input_sizes": inputs, "input_dtypes": dtypes, "output_sizes": outputs, "output_dtypes": dtypes,
        "state": "completed" if call.ended else "started", "time_discovered_started_ns": started_ns,
        "time_discovered_completed_ns": None, "retired": call.ended, "is_p2p": False,
        "timeout_ms": int(record.groups[key].timeout_s * 1000),
        "frames": [frame(text) for text in reversed(record.stack)] if under_way else [],
    }  # fmt: skip


def frame(text: str) -> dict[str, Any]:
    """Returns "train.py:12 in step" as torch writes a frame."""
    place, _, function = text.rpartition(" in ")
    file, _, line = place.rpartition(":")
    return {"name": function, "filename": file, "line": int(line)}


def described(facts: Facts, size: int) -> tuple[str, list[list[int]], list[list[int]]]:
    """Returns torch's name of a collective, and the sizes of its inputs and outputs in elements, or UNKNOWN."""
    name = NAMES.get(facts.operation, facts.operation)
    if facts.parts:
        counts = [[_count(part.nbytes, part.dtype)] for part in facts.parts]
        rows = [[count // size] for (count,) in counts]
        gathers, scatters = name.startswith("all_gather"), name.startswith("reduce_scatter")
        return name, rows if gathers else counts, rows if scatters else counts
    if facts.sends is not None and name == "all_to_all":
        sent, received = (sum((blocks or {}).values()) for blocks in (facts.sends, facts.receives))
        return name, [[_count(sent, facts.dtype)]], [[_count(received, facts.dtype)]]
    if facts.nbytes is None:
        return name, UNKNOWN, UNKNOWN
    whole = _count(facts.nbytes, facts.dtype)
    if name in GATHERS + SCATTERS:
        if facts.sizes and min(facts.sizes) != max(facts.sizes):
            return name, UNKNOWN, UNKNOWN
        part = [[whole // size]]
        return (name, part, [[whole]]) if name in GATHERS else (name, [[whole]], part)
    return name, [[whole]], [[whole]]


def _count(nbytes: int | None, dtype: str) -> int:
    """Elements of ``dtype`` in that many bytes."""
    bits = re.search(r"\d+", dtype)  # float8_e4m3fn, complex64; bool has none
    return (nbytes or 0) // max(1, int(bits[0]) // 8 if bits else 1)

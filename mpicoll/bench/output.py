"""The output of a run, on rank 0: lines when they are ready, JSON at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpicoll.bench.machine import Machine
from mpicoll.bench.row import Row


class Output:
    """Collects and prints rows on rank 0; does nothing on other ranks."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine = machine
        self.active = rank == 0
        self.rows: list[Row] = []
        self.extra: dict[str, Any] = {}  # further entries of the JSON file

    def say(self, *lines: str) -> None:
        for line in lines if self.active else ():
            print(line, flush=True)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def facts(self) -> dict[str, Any]:
        return {"machine": self.machine.facts(), "rows": [row.facts() for row in self.rows], **self.extra}

    def write(self, json_file: str | None) -> None:
        if self.active and json_file is not None:
            Path(json_file).write_text(json.dumps(self.facts(), indent=1) + "\n")

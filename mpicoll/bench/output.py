"""The output of a run, on rank 0: lines when they are ready, a progress bar, JSON and CSV at the end."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mpicoll.bench.machine import Machine
from mpicoll.bench.row import Row

Item = TypeVar("Item")


class Output:
    """Collects and prints rows on rank 0; does nothing on other ranks."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine = machine
        self.active = rank == 0
        self.rows: list[Row] = []
        self.extra: dict[str, Any] = {}  # further entries of the JSON file
        self._bar: Any = None

    def say(self, *lines: str) -> None:
        if not self.active:
            return
        if self._bar is not None:
            self._bar.stop()  # removes it
        for line in lines:
            print(line, flush=True)
        if self._bar is not None:
            self._bar.start()

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def progress(self, items: Iterable[Item], describe: Callable[[Item], str]) -> Iterator[Item]:
        """Yields the items. Shows a bar with the description of the present one if standard error is a terminal."""
        rich = _rich() if self.active and sys.stderr.isatty() else None
        if rich is None:
            yield from items
            return
        steps = list(items)
        # Refreshed at each step: a thread would disturb the measurement.
        self._bar = rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True, auto_refresh=False)
        task = self._bar.add_task("", total=len(steps))
        with self._bar:
            for done, item in enumerate(steps):
                self._bar.update(task, description=describe(item), completed=done, refresh=True)
                yield item
        self._bar = None

    def facts(self) -> dict[str, Any]:
        return {"machine": self.machine.facts(), "rows": [row.facts() for row in self.rows], **self.extra}

    def write(self, json_file: str | None, csv_file: str | None) -> None:
        if self.active and json_file is not None:
            Path(json_file).write_text(json.dumps(self.facts(), indent=1) + "\n")
        if self.active and csv_file is not None:
            with open(csv_file, "w", newline="") as file:
                writer = csv.DictWriter(file, _COLUMNS)
                writer.writeheader()
                for row in self.rows:
                    writer.writerows(_flat(row))


_COLUMNS = ["what", "bytes", "ranks", "dtype", "op", "way", "us", "least_us", "most_us", "algorithm_GB_per_s", "bus_GB_per_s"]


def _flat(row: Row) -> Iterator[dict[str, Any]]:
    facts = row.facts()
    for way, figures in facts["ways"].items():
        yield {name: {**facts, **figures, "way": way}[name] for name in _COLUMNS}


def _rich() -> Any:
    try:
        importlib.import_module("rich.console")
        importlib.import_module("rich.progress")
    except ModuleNotFoundError:
        return None
    return sys.modules["rich"]

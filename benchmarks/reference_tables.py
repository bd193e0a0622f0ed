"""Makes tables of docs/reference: command-line.md from the parsers, settings.md and reductions.md from their tables.

    python -m benchmarks.reference_tables        writes them; tests/project/test_package.py compares

They are not the texts of ``--help``, because every version of Python lays those out in another way.
"""

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator

import torch

from mpicoll._base import config
from mpicoll._launch import arguments
from mpicoll._launch.doctor import checks, dump
from mpicoll._tensors import reductions
from mpicoll.bench import options
from mpicoll.bench.messages import MESSAGES
from mpicoll.bench.operations import COLLECTIVES
from tests.support import ROOT

PAGES = tuple(ROOT / f"docs/reference/{page}.md" for page in ("command-line", "settings", "reductions"))
FIELD = re.compile(r"(<!-- made: ([\w ]+) -->\n).*?(<!-- /made -->\n)", re.DOTALL)
HEADS = ("| option | meaning |", "|---|---|")
FAMILIES = {"collectives": COLLECTIVES, "messages": MESSAGES}
WIDTH = 140  # characters of a line of text


def run() -> Iterator[str]:
    parser = arguments.make_parser("mpicoll run")
    yield from HEADS
    for group in parser._action_groups:
        rows = [row(action) for action in shown(group._group_actions) if "--version" not in action.option_strings]
        if rows:
            yield from (f"| **{group.title}** | |", *rows)
    yield ""
    status = " ".join((parser.epilog or "").split("\n\n")[-1].split())
    yield from textwrap.wrap(f"{status[0].upper()}{status[1:]}.", WIDTH)


def doctor_options() -> Iterator[str]:
    yield from (*HEADS, *map(row, shown(checks.make_parser("mpicoll doctor")._actions)))


def dump_options() -> Iterator[str]:
    yield from (*HEADS, *map(row, shown(dump.make_parser("mpicoll doctor dump")._actions)))


def benchmarks() -> Iterator[str]:
    rows: list[str] = []
    yield from ("| WHAT | measures |", "|---|---|")
    names: list[str] = []
    for what, text in reversed(options.HELP.items()):
        names.insert(0, f"`{what}`")
        if text is not None:
            rows.insert(0, f"| {', '.join(names)} | {text} |")
            names.clear()
    yield from rows


def bench_options() -> Iterator[str]:
    """The options of all benchmarks, each with the benchmarks that have it."""
    yield from ("| option | meaning | benchmarks |", "|---|---|---|")
    for action in shown(options.make_parser()._actions):
        if action.option_strings:
            having = [what for what in options.HELP if options.takes(what, action.dest)]
            yield f"{row(action)} {'all' if len(having) == len(options.HELP) else families(having)} |"


def families(benchmarks: list[str]) -> str:
    names, rest = [], benchmarks
    for family, members in FAMILIES.items():
        have = [what for what in members if what in rest]
        without = [what for what in members if what not in rest]
        if len(have) > len(without):
            names.append(f"{family} but {spell(without)}" if without else family)
            rest = [what for what in rest if what not in members]
    return ", ".join([*names, *([spell(rest)] if rest else [])])


def spell(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def shown(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    return [action for action in actions if action.help is not argparse.SUPPRESS and "--help" not in action.option_strings]


def row(action: argparse.Action) -> str:
    values = action.metavar or (action.choices and "|".join(map(str, action.choices))) or ""
    words = " ".join(values) if isinstance(values, tuple) else str(values)
    if action.nargs == 0:
        words = ""
    if action.nargs == "+":
        words += " ..."
    names = [f"`{name}`" for name in action.option_strings] or [f"`{words or action.dest}`"]
    value = f" `{words}`" if words and action.option_strings else ""
    return f"| {cell(', '.join(names) + value)} | {cell(str(action.help))} |"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def settings() -> Iterator[str]:
    yield from ("| variable | type | default | meaning |", "|---|---|---|---|")
    for variable in config.VARIABLES:
        default = "unset" if variable.default in (None, "") else variable.spell(variable.default)
        yield f"| `{variable.name}` | {variable.kind.__name__} | {default} | {variable.meaning} |"


def reduced() -> Iterator[str]:
    """N: native, K: by torch kernels around MPI, -: refused with a TypeError."""
    yield from ("| dtype | moves | " + " | ".join(reductions.OPS) + " |", "|---|---|" + "---|" * len(reductions.OPS))
    opaque = (torch.float8_e4m3fn, torch.float8_e5m2)
    for dtype in (torch.bool, *reductions.INTEGERS, *reductions.HALVES, *reductions.FLOATS, *reductions.COMPLEX, *opaque):
        entries = [reductions.TABLE.get((dtype, op)) for op in reductions.OPS.values()]
        cells = ["-" if entry is None else "N" if entry.native else "K" for entry in entries]
        yield f"| {str(dtype).removeprefix('torch.')} | yes | {' | '.join(cells)} |"


FIELDS: dict[str, Callable[[], Iterator[str]]] = {
    "run": run,
    "doctor": doctor_options,
    "dump": dump_options,
    "benchmarks": benchmarks,
    "bench": bench_options,
    "settings": settings,
    "reductions": reduced,
}


def made(page: str) -> str:
    """The text of a page with its fields made anew."""
    return FIELD.sub(lambda match: match[1] + "\n" + "\n".join(FIELDS[match[2]]()).rstrip() + "\n\n" + match[3], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(made(path.read_text()))

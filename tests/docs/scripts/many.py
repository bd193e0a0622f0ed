"""Runs programs one after the other on the ranks of one job: ``many.py PLAN``.

PLAN is a JSON file with three values for each program: the folder in which it runs, the folder for what the ranks print, and its
words, a script and arguments. A program finds what a process of its own has: arguments, environment, search path, warnings,
random numbers, torch's settings, and no process group. A rank that has run it to its end leaves a file ``ended-RANK``.
"""

import contextlib
import json
import os
import random
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed


@contextlib.contextmanager
def printing_to(folder: Path) -> Iterator[None]:
    """Standard output and error go to files of ``folder``, to which all ranks append their lines."""
    kept = [os.dup(1), os.dup(2)]
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(file, number)
            os.close(file)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in zip((1, 2), kept, strict=True):
            os.dup2(file, number)
            os.close(file)


@contextlib.contextmanager
def as_in_a_process_of_its_own(folder: str, words: list[str]) -> Iterator[None]:
    """What a program changes is undone after it: Python's state, and torch's."""
    state, environ, modules, path = torch.get_rng_state(), dict(os.environ), set(sys.modules), list(sys.path)
    home, threads, dtype = os.getcwd(), torch.get_num_threads(), torch.get_default_dtype()
    random.seed()
    np.random.seed()  # noqa: NPY002
    os.chdir(folder)
    sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
    with warnings.catch_warnings():
        yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    places = {Path(place).resolve() for place in set(sys.path) - set(path)}
    for name in set(sys.modules) - modules:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent in places:
            del sys.modules[name]  # the next program may have another file of this name, or change this one
    os.chdir(home)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = path


def run(words: list[str]) -> None:
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # as at the end of a process


def main(plan: str) -> None:
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    for folder, printed, words in json.loads(Path(plan).read_text()):
        with printing_to(Path(printed)), as_in_a_process_of_its_own(folder, words):
            run(words)
        (Path(printed) / f"ended-{os.environ['RANK']}").touch()


if __name__ == "__main__":
    main(sys.argv[1])

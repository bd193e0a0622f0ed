"""``pytest --ranks 1,2,4``: one MPI job for each number of ranks, one after the other, by ``python -m mpicoll.run``.

The process that starts the jobs loads no conftest and no torch. It merges what the jobs leave: the exit status is that of the
worst, the XML file has one suite of each job, the cache has the failures of all, and pytest-cov adds up.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mpicoll._base import launcher

MARK = "_MPICOLL_TESTING"  # set for the jobs: the folder for their results
EARLY = "ended early"
LAST_FAILED = "cache/lastfailed"
OF_ALL = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def run(config: pytest.Config, ranks: str) -> None:
    """Runs the jobs, and ends this process by the exit status of the worst. Does nothing in a rank of such a job."""
    if MARK in os.environ:
        return
    sizes = _sizes(ranks)
    launch = launcher.detect()
    if launch is not None and launcher.started_by_mpi():
        raise pytest.UsageError(
            f"--ranks {ranks}: this is rank {launch.rank} of {launch.size} that {launch.launcher} has started; "
            "leave --ranks out, or start pytest without the launcher"
        )
    known: Any = config.known_args_namespace
    for option, asked in (("--pdb", known.usepdb), ("-n (pytest-xdist)", getattr(known, "numprocesses", None))):
        if asked:
            raise pytest.UsageError(f"--ranks and {option} do not go together: several ranks share one terminal and the cores")
    _end(_Jobs(config, sizes).run())


def _sizes(ranks: str) -> list[int]:
    words = ranks.split(",")
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise pytest.UsageError(f"--ranks {ranks}: give a number of ranks, or several with commas, as in --ranks 1,2,4")
    return list(map(int, words))


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(status)


class _Jobs:
    """The jobs of one command line."""

    def __init__(self, config: pytest.Config, sizes: list[int]) -> None:
        self.config, self.sizes = config, sizes
        self.known: Any = config.known_args_namespace
        self.args = without_option(list(map(str, config.invocation_params.args)), "--ranks")
        kept = config.pluginmanager.hasplugin("cacheprovider")
        self.cache = config.rootpath / (config.getini("cache_dir") if kept else ".pytest_cache")
        self.folder = Path(tempfile.mkdtemp(prefix="mpicoll-testing-"))

    def run(self) -> int:
        before = self._failed()
        failed: dict[str, bool] = {}
        statuses: dict[int, int] = {}
        try:
            for size in self.sizes:
                if len(self.sizes) > 1:
                    self._write_failed(before)
                    print(f"\n{f' {size} ranks ' if size > 1 else ' 1 rank ':#^80}", flush=True)
                statuses[size] = self._run_one(size, first=size == self.sizes[0])
                failed |= self._failed()
                if statuses[size] not in OF_ALL and self.known.maxfail:
                    break
            if len(self.sizes) > 1:
                self._write_failed(failed)
                self._merge_xml()
                print(f"\n{' all numbers of ranks ':#^80}")
            for size in self.sizes:
                path = self.folder / f"{size}.txt"
                words = path.read_text() if path.exists() else "not run" if size not in statuses else EARLY
                if len(self.sizes) > 1 or words.startswith(EARLY):  # rank 0 has had no time for its summary
                    status = f" (exit status {statuses[size]})" if statuses.get(size) else ""
                    print(f"{'1 rank' if size == 1 else f'{size} ranks'}: {words}{status}")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return worst(list(statuses.values()))

    def _run_one(self, size: int, first: bool) -> int:
        args = list(self.args)
        if len(self.sizes) > 1 and self.known.xmlpath:
            args += [f"--junitxml={self.folder / f'{size}.xml'}"]
        if not first and getattr(self.known, "cov_source", None):
            args += ["--cov-append"]
        command = [sys.executable, "-m", "mpicoll.run", "-n", str(size), "-m", "pytest", *args]
        process: subprocess.Popen[bytes] | None = None

        def pass_on(number: int, frame: object) -> None:
            if process is not None and number != signal.SIGINT:  # a terminal sends SIGINT to the job, too
                process.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            process = subprocess.Popen(command, env={**os.environ, MARK: str(self.folder)}, cwd=self.config.invocation_params.dir)
            status = process.wait()
        finally:
            for number, action in before.items():
                signal.signal(number, action)
        return status if status >= 0 else 128 - status

    # -- the cache --

    def _failed(self) -> dict[str, bool]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, bool] = json.loads((self.cache / "v" / LAST_FAILED).read_text())
            return found
        return {}

    def _write_failed(self, failed: dict[str, bool]) -> None:
        path = self.cache / "v" / LAST_FAILED
        if failed or path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(failed, indent=2))

    # -- what the user sees --

    def _merge_xml(self) -> None:
        if not self.known.xmlpath:
            return
        from xml.etree import ElementTree

        merged = ElementTree.Element("testsuites", name="pytest tests")
        for size in self.sizes:
            path = self.folder / f"{size}.xml"
            for suite in ElementTree.parse(path).getroot() if path.exists() else ():
                suite.set("name", f"{suite.get('name')}, {size} ranks")
                merged.append(suite)
        target = Path(self.config.invocation_params.dir, self.known.xmlpath)
        target.parent.mkdir(parents=True, exist_ok=True)
        ElementTree.ElementTree(merged).write(target, encoding="utf-8", xml_declaration=True)


def note(text: str, size: int) -> None:
    """Leaves the counts of this job for the summary of all."""
    if MARK in os.environ:
        with contextlib.suppress(OSError):  # rank 0 is on another host
            Path(os.environ[MARK], f"{size}.txt").write_text(text)


def without_option(args: list[str], name: str) -> list[str]:
    """The arguments without the option ``name`` and its value."""
    kept: list[str] = []
    skip = False
    for arg in args:
        if not skip and arg != name and not arg.startswith(f"{name}="):
            kept.append(arg)
        skip = arg == name and not skip
    return kept


def worst(statuses: list[int]) -> int:
    """No tests, on one of several numbers of ranks, is no failure."""
    bad = [status for status in statuses if status not in OF_ALL]
    return max(bad) if bad else int(min(statuses))

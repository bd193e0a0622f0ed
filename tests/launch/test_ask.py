"""Processes with a time limit: their reports, their last words, and that none of them stays behind."""

import os
import sys
from pathlib import Path

from mpicoll._launch.find.ask import Ended, ask, output_of
from tests.launch.jobs import runs
from tests.support import eventually


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_without_a_report_the_last_words_say_why() -> None:
    code = "import sys; print('first\\nsecond\\n-----', file=sys.stderr); sys.exit(3)"
    assert ask(python(code), os.environ, 20) == {"error": "second", "status": 3}
    assert ask(python(code), os.environ, 20, lines=2)["error"] == "first\nsecond"
    assert Ended("", "", -11).last_words() == "status -11, without a word"


def test_a_time_limit_ends_the_process_and_its_children(tmp_path: Path) -> None:
    """A child that ignores SIGTERM, as the ranks of a killed mpiexec do, must not stay behind."""
    file = tmp_path / "pid"
    child = f"import os, signal, time; signal.signal(15, signal.SIG_IGN); open({str(file)!r}, 'w').write(str(os.getpid()))"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child + '; time.sleep(60)'!r}])"
    report = ask(python(code), os.environ, 3)
    assert report["status"] is None
    assert "no end within 3 s" in report["error"]
    assert eventually(lambda: not runs(file.read_text())), "the child is still there"


def test_a_tool_that_is_missing_or_hangs_says_nothing() -> None:
    assert output_of(["/nowhere/tool"], os.environ, 5) is None
    assert output_of(python("import time; time.sleep(60)"), os.environ, 0.3) is None
    assert (
        output_of(python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(1)"), os.environ, 20) == "out\nerr\n"
    )

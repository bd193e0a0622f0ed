"""blocks.py finds files, commands and sessions in a page, and differences between what is shown and what is printed."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from tests.docs import blocks, outputs
from tests.support import ROOT

PAGE = """
```python
# first.py
print(1)
```

```python
# first.py, continued
print(2)
```

```console
$ mpicoll run -n 1 first.py
1
2
$ A=b python -m mpicoll.run -n 2 first.py
...
```

```python
>>> 1 + 1
2
```

```console
$ ls
```

```text
# hosts.txt
node01 slots=1
```

```text
a picture
```

```console
$ mpicoll run --hostfile hosts.txt second.py
```

<!-- numbers vary -->
```console
$ mpicoll run -n 1 first.py
took 1.5 us
```
"""


@pytest.fixture
def jobs(tmp_path: Path) -> list[blocks.Job]:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    return blocks.jobs(page)


def test_files_and_commands(jobs: list[blocks.Job]) -> None:
    assert [job.words for job in jobs] == ["-n 1 first.py", "-n 2 first.py", "--hostfile hosts.txt second.py", "-n 1 first.py"]
    assert [job.environment for job in jobs] == [{}, {"A": "b"}, {}, {}]
    assert [job.shown for job in jobs] == [["1", "2"], ["..."], [], ["took 1.5 us"]]
    assert [job.needs_hosts for job in jobs] == [False, False, True, False]
    assert [list(job.files) for job in jobs] == [["first.py"], ["first.py"], ["first.py", "hosts.txt"], ["first.py", "hosts.txt"]]
    assert [line for line in jobs[0].files["first.py"].splitlines() if line.startswith("print")] == ["print(1)", "print(2)"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("mpicoll run -n 1 first.py", ["-m", "mpicoll.run", "-n", "1", "first.py"]),
        ("python -m mpicoll.run -n 1 first.py", ["-m", "mpicoll.run", "-n", "1", "first.py"]),
        ("mpicoll doctor dump records", ["-m", "mpicoll.doctor", "dump", "records"]),
        ("python first.py --fast", ["first.py", "--fast"]),
        ("python examples/first.py", [str(ROOT / "examples/first.py")]),
    ],
)
def test_commands_are_run_by_this_python(command: str, words: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```console\n$ {command}\n1\n```\n")
    (job,) = blocks.jobs(page)
    assert job.argv == [sys.executable, *words]
    assert job.shown == ["1"]


@pytest.mark.parametrize(
    ("comments", "needs", "vary"),
    [
        ("", None, None),
        ("<!-- needs companions -->\n", "companions", None),
        ("<!-- numbers vary -->\n<!-- needs Open MPI 5 -->\n", "Open MPI 5", "numbers"),
        ("<!-- times vary -->\n", None, "times"),
    ],
)
def test_comments_before_a_block(comments: str, needs: str | None, vary: str | None, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{comments}```console\n$ mpicoll run -n 1 first.py\n```\n")
    (job,) = blocks.jobs(page)
    assert (job.needs, job.vary) == (needs, vary)


def test_commands_of_a_block_belong_together(jobs: list[blocks.Job]) -> None:
    assert [len(console) for console in blocks.consoles(jobs[0].page)] == [2, 1, 1]


def test_files_are_written(jobs: list[blocks.Job], tmp_path: Path) -> None:
    jobs[2].write_files(tmp_path)
    assert (tmp_path / "hosts.txt").read_text() == "# hosts.txt\nnode01 slots=1\n"


def test_a_session_keeps_its_lines(jobs: list[blocks.Job]) -> None:
    lines = blocks.session(jobs[0].page).splitlines()
    assert [line for line in lines if line] == [">>> 1 + 1", "2"]
    assert PAGE.splitlines()[lines.index("2")] == "2"


@pytest.mark.parametrize(
    ("shown", "stdout", "stderr", "difference"),
    [
        ("a\nb", "b\na\n", "noise\n", ""),
        ("a", "a  \n", "", ""),
        ("a", "a\na\n", "", "printed, not shown: a"),
        ("a\na", "a\n", "", "shown, not printed: a"),
        ("a\nerror: ... on ...", "a\n", "noise\nerror: x on y\n", ""),
        ("...\nb", "a\nb\n", "", ""),
        ("...\nb", "a\n", "", "shown, not printed: b"),
        ("a.c", "abc\n", "", "shown, not printed: a.c\nprinted, not shown: abc"),
    ],
)
def test_differences(jobs: list[blocks.Job], shown: str, stdout: str, stderr: str, difference: str) -> None:
    jobs[0].shown = shown.splitlines()
    assert blocks.differences(jobs[0], stdout, stderr) == difference


@pytest.mark.parametrize(
    ("stdout", "equal"), [("took 1.5 us", True), ("took  23 us", True), ("took 4e-06 us", True), ("took long", False)]
)
def test_numbers_that_vary(jobs: list[blocks.Job], stdout: str, equal: bool) -> None:
    assert (blocks.differences(jobs[3], stdout, "") == "") == equal


@pytest.mark.parametrize(
    ("stdout", "equal"),
    [
        ("2 steps of 31 ms, 87% during backward, 1.5 tokens/s", True),
        ("3 steps of 31 ms, 87% during backward, 1.5 tokens/s", False),
        ("2 steps of 31 ms, 87% after backward, 1.5 tokens/s", False),
    ],
)
def test_times_that_vary(jobs: list[blocks.Job], stdout: str, equal: bool) -> None:
    job = dataclasses.replace(jobs[3], vary="times", shown=["2 steps of 0.4 ms, 100% during backward, 7,000 tokens/s"])
    assert (blocks.differences(job, stdout + "\n", "") == "") == equal


def test_an_output_is_written_anew(jobs: list[blocks.Job]) -> None:
    """outputs.py changes the lines below one command. Another command of the same words keeps its own."""
    text = outputs.renewed(PAGE, jobs[0], "1\n  3  \n")
    assert text == PAGE.replace("1\n2\n$ A=b", "1\n  3\n$ A=b")

"""docs/reference/clusters.md has every test of tests/cluster, and no other. Every srun that is shown has -K."""

from __future__ import annotations

import re

from tests.support import ROOT


def test_the_tables_are_the_tests() -> None:
    page = (ROOT / "docs" / "reference" / "clusters.md").read_text()
    for name, heading in (("test_slurm.py", "## Slurm"), ("test_hosts.py", "## ssh")):
        section = page.partition(heading)[2].partition("\n## ")[0]
        tests = re.findall(r"^def (test_\w+)", (ROOT / "tests" / "cluster" / name).read_text(), re.MULTILINE)
        assert f"`tests/cluster/{name}`" in section
        assert set(re.findall(r"`(test_\w+)` \|$", section, re.MULTILINE)) == set(tests)


def test_every_srun_ends_the_step_if_a_rank_fails() -> None:
    """Without -K, ranks that have not met in MPI yet wait for ever for one that has ended."""
    folders = [ROOT / "docs", ROOT / "examples", ROOT / "hostfiles"]
    files = [*ROOT.glob("README*.md"), *(file for folder in folders for file in folder.rglob("*"))]
    texts = [file.read_text() for file in files if file.suffix in (".md", ".py", ".sh", ".sbatch")]
    commands = [command for text in texts for command in re.findall(r"srun -[^`|\n]*python[^`|\n]*", text)]
    assert len(commands) >= 8
    assert [command for command in commands if not re.search(r" (-K|--kill-on-bad-exit)\b", command)] == []

"""docs/reference/clusters.md has every test of tests/cluster, and no other."""

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

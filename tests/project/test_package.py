"""What the project says of itself outside its code: packaging, citation, CI, the page for contributors.

`bash .ci/run package` builds the package and checks what is in it.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import mpicoll
from tests.support import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()
CI = (ROOT / ".ci/run").read_text()
PARTS = set(re.findall(r"^part_([\w-]+)\(\)", CI, re.MULTILINE))
TIERS = {tier: parts.split() for tier, parts in re.findall(r'^ +\[(\w+)\]="([\w -]+)"$', CI, re.MULTILINE)}
WORKFLOW = ROOT / ".github/workflows/ci.yml"
needs_repository = pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="an sdist has no .github")


def files() -> list[Path]:
    """The files that git tracks and that are text."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).suffix not in (".svg", ".png")]


@needs_repository
def test_the_version_is_set_in_one_place() -> None:
    """The recipes repeat it, since their formats want it: test_recipes.py compares."""
    assignment = re.compile(rf"version_*\W{{0,6}}{re.escape(mpicoll.__version__)}", re.IGNORECASE)
    found = {
        str(path.relative_to(ROOT)) for path in files() if path.exists() and assignment.search(path.read_text(errors="replace"))
    }
    assert {name for name in found if not name.startswith("docs/recipes/")} == {"mpicoll/__init__.py"}
    assert 'version = { attr = "mpicoll.__version__" }' in PROJECT


def test_the_classifiers_name_the_versions_of_python_that_were_run() -> None:
    named = set(re.findall(r"Python :: (3\.\d+)", PROJECT))
    table = (ROOT / "docs/reference/compatibility.md").read_text().partition("| Python | torch |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| 3.")]
    assert named == {version for cell in cells for version in re.findall(r"\b3\.\d+", cell)}
    least = re.search(r'^requires-python = ">=([\d.]+)"', PROJECT, re.MULTILINE)
    assert least is not None
    assert least[1] in named


def test_the_citation_is_of_this_package() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    license_of_project = re.search(r'^license = "(.*)"$', PROJECT, re.MULTILINE)
    assert license_of_project is not None
    assert f"license: {license_of_project[1]}\n" in text
    assert 'name: "the mpicoll authors"' in text
    assert 'authors = [{ name = "the mpicoll authors" }]' in PROJECT


def test_each_part_of_ci_is_in_one_tier_and_in_its_help() -> None:
    assert sorted(part for parts in TIERS.values() for part in parts) == sorted(PARTS)
    head = CI.partition("\nset -u")[0]
    assert {part for part in PARTS if not re.search(rf"^#.* {part} ", head, re.MULTILINE)} == set()


@needs_repository
def test_the_workflow_runs_the_tiers_of_ci() -> None:
    text = WORKFLOW.read_text()
    jobs = re.findall(r"^  (\w+):\n(?:    .*\n)*?        part: \[([\w, -]+)\]$", text, re.MULTILINE)
    assert {tier: parts.split(", ") for tier, parts in jobs} == TIERS
    runs = re.findall(r'run: (?:sudo env PATH="\$PATH" )?(.*)', text)
    assert runs
    assert all(command.startswith("bash .ci/run ") for command in runs), "what a job does belongs in .ci/run"


def setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, which builds nothing."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TEXT = "![a plot](docs/a.svg) [pages](docs/README.md#top), [PyTorch](https://pytorch.org) and [below](#use)"


def test_the_description_has_no_links_into_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    module = setup(monkeypatch)
    monkeypatch.setattr(module, "FILES", "")
    assert module.outside_the_repository(TEXT) == " pages, [PyTorch](https://pytorch.org) and [below](#use)"
    readme = module.outside_the_repository((ROOT / "README.md").read_text())
    assert "Eight short programs" in readme
    assert "](docs/" not in readme
    assert "中文" not in readme


def test_the_description_has_absolute_links_where_the_repository_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    module = setup(monkeypatch)
    monkeypatch.setattr(module, "FILES", "https://example.org/mpicoll/")
    assert module.outside_the_repository(TEXT) == (
        "![a plot](https://example.org/mpicoll/docs/a.svg) [pages](https://example.org/mpicoll/docs/README.md#top), "
        "[PyTorch](https://pytorch.org) and [below](#use)"
    )

"""The recipes in docs/recipes name the version and the dependencies of pyproject.toml."""

from __future__ import annotations

import re

import pytest

import mpicoll
from tests.support import ROOT

RECIPES = ROOT / "docs" / "recipes"
EASYBUILD = RECIPES / f"mpicoll-{mpicoll.__version__}-foss-2026.1.eb"
SPACK = RECIPES / "spack" / "packages" / "py_mpicoll" / "package.py"
PROJECT = (ROOT / "pyproject.toml").read_text()


def project(pattern: str) -> str:
    """What the group of ``pattern`` finds in pyproject.toml."""
    found = re.search(pattern, PROJECT, re.MULTILINE)
    assert found is not None, pattern
    return found[1]


PYTHON, SETUPTOOLS = project(r'^requires-python = ">=([\d.]+)"'), project(r'"setuptools>=(\d+)"')
# The least version of each dependency; empty: any.
DEPENDENCIES: dict[str, str] = dict(re.findall(r'"(\w+)(?:>=([\d.]+))?"', project(r"^dependencies = \[(.*)\]$")))


def at_least(version: str, least: str) -> bool:
    return [int(n) for n in version.split(".")[:2]] >= [int(n) for n in (least or "0").split(".")]


def test_the_easyconfig() -> None:
    text = EASYBUILD.read_text()
    found = dict(re.findall(r"\('([\w-]+)', '([\d.]+)", text))
    found["numpy"] = found["SciPy-bundle"]
    assert f"version = '{mpicoll.__version__}'" in text
    assert {name for name, least in DEPENDENCIES.items() if not at_least(found.get(name, "0"), least)} == set()


def test_the_package_of_spack() -> None:
    text = SPACK.read_text()
    found = dict(re.findall(r'depends_on\("(?:py-)?(\w+)(?:@([\d.]+):)?', text))
    assert f'version("{mpicoll.__version__}"' in text
    assert {name: found.get(name) for name in DEPENDENCIES} == DEPENDENCIES
    assert (found["python"], found["setuptools"]) == (PYTHON, SETUPTOOLS)


@pytest.mark.parametrize("name", ["Dockerfile", "apptainer.def"])
def test_the_containers_copy_what_the_build_reads(name: str) -> None:
    text = (RECIPES / name).read_text()
    files = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt", "mpicoll"]
    assert [file for file in files if not re.search(rf"^(?:COPY| {{4}}).*\b{re.escape(file)}\b", text, re.MULTILINE)] == []
    assert all((ROOT / file).exists() for file in files)


def test_the_recipe_for_conda() -> None:
    text = (RECIPES / "recipe.yaml").read_text()
    run = text.partition("  run:\n")[2].partition("\n\n")[0]
    found = dict(re.findall(r"^ {4}- (\w+)(?: >=([\d.]+))?$", run, re.MULTILINE))
    assert f'version: "{mpicoll.__version__}"' in text
    found["torch"] = found.pop("pytorch")
    assert found == {"python": PYTHON, **DEPENDENCIES}
    assert f"    - setuptools >={SETUPTOOLS}\n" in text
    assert "- mpicoll = " + project(r'^mpicoll = "(.*)"$') + "\n" in text


def test_the_modulefile() -> None:
    assert f"mpicoll/{mpicoll.__version__}" in (RECIPES / "modulefile").read_text()


def test_sites_names_every_recipe() -> None:
    page = (ROOT / "docs" / "sites.md").read_text()
    files = [path for path in RECIPES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = [path.name for path in files if path.name != "repo.yaml"]
    assert len(names) == 7
    assert [name for name in names if name not in page] == []

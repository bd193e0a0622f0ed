"""Editors and type checkers see every public name of mpicoll with its type. Tried with mypy and with pyright (basedpyright).

The checkers find mpicoll as an editor does: installed, by `pip install` or `pip install -e`, with the marker py.typed.
`bash .ci/run lint` runs this file; the rest of the suite does not collect it (conftest.py).
"""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mpicoll
import mpicoll._overloads as editors
from benchmarks import overloads
from tests.support import ROOT

MODULES = ("mpicoll", "mpicoll.nn", "mpicoll.nn.functional", "mpicoll.rpc", "mpicoll.autograd", "mpicoll.optim", "mpicoll.errors")
# mpicoll.nn has them as torch.distributed.nn has them: because that file imports them.
IMPORTED = {"mpicoll.nn.Function", "mpicoll.nn.dist", "mpicoll.nn.torch", "mpicoll.nn.warnings"}
NAMES = [
    name
    for module in MODULES
    for name in (f"{module}.{word}" for word in importlib.import_module(module).__all__)
    if name not in IMPORTED
]

# What a program does, with the types that its author expects.
PROGRAM = """
import torch
from typing_extensions import assert_type

import mpicoll as dist
from mpicoll import LaunchError, ReduceOp
from mpicoll import rpc
from mpicoll.device_mesh import DeviceMesh, init_device_mesh
from mpicoll.fsdp import fully_shard
from mpicoll.nn import Grid, halo_exchange
from mpicoll.nn.functional import all_gather
from mpicoll.tensor import DTensor


def train(rank: int, steps: int) -> None:
    dist.init_process_group(timeout=None)
    x = torch.ones(4)
    dist.all_reduce(x, op=ReduceOp.MAX, async_op=True).wait()
    dist.broadcast(x, 0, group=dist.new_group([0]))
    print(dist.new_subgroups(2)[0].size(), dist.new_subgroups_by_enumeration([[0, 1]])[1][0].rank())
    dist.isend(x, 1).wait()
    dist.irecv(x, 1).source_rank()
    group: dist.ProcessGroup | None = dist.split_group(split_ranks=[[0], [1]])
    sender: int = dist.recv(x, src=None)
    works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0)])
    y: torch.Tensor = halo_exchange(x, Grid((2,)), -1, (1, 1))
    parts: tuple[torch.Tensor, ...] = all_gather(y)
    mesh: DeviceMesh = init_device_mesh("cpu", (2,))
    reference: rpc.RRef[object] = rpc.remote("worker1", torch.ones, (2,))
    answer: torch.futures.Future[object] = rpc.rpc_async("worker1", torch.ones, (2,))
    print(fully_shard, DTensor, rank, steps, group, sender, works, parts, mesh, reference, answer)


try:
    dist.spawn(train, args=(10,), nprocs=2)
except (LaunchError, dist.RankRaised) as error:
    print(error)


# What functions with ``async_op`` return. The overloads of the others are made by the same lines (benchmarks/overloads.py).
def start(x: torch.Tensor, xs: list[torch.Tensor], group: dist.ProcessGroup, later: bool) -> None:
    assert_type(dist.all_reduce(x), None)
    assert_type(dist.all_reduce(x, async_op=False), None)
    assert_type(dist.all_reduce(x, async_op=True), dist.Work)
    assert_type(dist.all_reduce(x, dist.ReduceOp.MAX, group, True), dist.Work)
    assert_type(dist.all_reduce(x, async_op=later), dist.Work | None)
    assert_type(dist.all_reduce(x, dist.ReduceOp.MAX, group, later), dist.Work | None)
    assert_type(dist.broadcast(x, 0, group, True, None), dist.Work)
    assert_type(dist.broadcast(x, group_src=0, async_op=True), dist.Work)
    assert_type(dist.all_reduce_coalesced(xs), None)
    assert_type(dist.all_reduce_coalesced(xs, async_op=True), torch.futures.Future[list[torch.Tensor]])
"""
MISTAKES = {
    "dist.all_reduse(x)": "all_reduse",
    "dist.nn.no_such_name": "no_such_name",
    "dist.errors.no_such_name": "no_such_name",
    "dist.rpc.no_such_name": "no_such_name",
    'dist.broadcast(x, src="0")': "broadcast",
    'dist.send(x, dst="0")': "int",
    "dist.all_reduce([x])": "Tensor",
    "dist.all_reduce(x).wait()": "None",
    'dist.all_reduce(x, async_op="yes")': "all_reduce",
}
ERROR = re.compile(r"^ *\S+\.py:(?P<line>\d+)(?::\d+)?:?(?: -)? error: (?P<text>.*)", re.MULTILINE)
REVEALED = re.compile(
    r"^ *\S+\.py:(?P<line>\d+)(?::\d+)? ?(?:-|:) (?:information: Type of \S+|note: Revealed type) is \"(?P<type>.*)\"",
    re.MULTILINE,
)


def stub() -> ast.Module:
    return ast.parse((ROOT / "mpicoll/__init__.pyi").read_text())


def test_the_stub_has_the_names_that_are_loaded_on_first_use() -> None:
    """Each from the module that OURS names; torch's other names come by ``from torch.distributed import *``."""
    found = {
        alias.name: node.module
        for node in stub().body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mpicoll.")
        for alias in node.names
    }
    overloaded = {name for name, module in found.items() if module == "mpicoll._overloads"}
    assert overloaded == set(overloads.with_async_op())
    assert found == {name: found[name] if name in overloaded else module for name, module in mpicoll.OURS.items()}


def test_the_overloads_are_made_of_the_functions() -> None:
    made, kept = (ast.dump(ast.parse(text)) for text in (overloads.text(), overloads.STUB.read_text()))
    assert made == kept, f"`{overloads.COMMAND}` makes them anew"
    for name in overloads.with_async_op():
        assert getattr(editors, name) is getattr(mpicoll, name), "editors show the docstring that they find there"


def test_the_marker_and_the_stubs_are_installed() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mpicoll"]
    assert (ROOT / "mpicoll/py.typed").exists()
    assert data == ["py.typed", "*.pyi"]
    assert not list((ROOT / "mpicoll").glob("*/**/*.pyi")), "package-data names those of the uppermost folder only"


Checker = Callable[[Path], str]


def run_mypy(file: Path) -> str:
    cache = file.parent.parent / "cache"  # of all programs of this session: torch, which each imports, takes the most time
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={cache}", str(file)]
    return output(command, {}, file.parent)


def run_pyright(file: Path) -> str:
    return output([sys.executable, "-m", "basedpyright", str(file)], {}, file.parent)


def output(command: list[str], variables: dict[str, str], folder: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, cwd=folder, timeout=240)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


CHECKERS = [
    pytest.param(checker, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed"))
    for checker, name in ((run_mypy, "mypy"), (run_pyright, "basedpyright"))
]


@pytest.mark.launch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", CHECKERS)
def test_every_public_name_has_a_type(check: Checker, tmp_path: Path) -> None:
    """reveal_type of each name: none is Any or Unknown, and none is missing."""
    lines = [*(f"import {module}" for module in MODULES), *(f"reveal_type({name})" for name in NAMES)]
    said = check(written(tmp_path, "\n".join(lines)))
    assert not ERROR.search(said), said
    types = {lines[int(found["line"]) - 1]: found["type"] for found in REVEALED.finditer(said)}
    assert set(lines[len(MODULES) :]) <= set(types), said
    assert not [f"{line}: {kind}" for line, kind in types.items() if re.fullmatch("Any|Unknown|Never|builtins.object", kind)]


@pytest.mark.launch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", CHECKERS)
def test_a_program_has_no_errors_and_mistakes_are_seen(check: Checker, tmp_path: Path) -> None:
    assert not ERROR.search(said := check(written(tmp_path, PROGRAM))), said
    text = "import torch\nimport mpicoll as dist\nx = torch.ones(1)\n"
    said = check(written(tmp_path, text + "\n".join(MISTAKES)))
    errors = {int(found["line"]) - 4: found["text"] for found in ERROR.finditer(said)}
    assert sorted(errors) == list(range(len(MISTAKES))), said
    for number, word in enumerate(MISTAKES.values()):
        assert word in errors[number]


@pytest.mark.launch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", CHECKERS[:1])
def test_the_module_below_the_stub(check: Checker, tmp_path: Path) -> None:
    """mypy reads __init__.pyi in place of __init__.py, which it shall check as well."""
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "__init__.py").write_text((ROOT / "mpicoll/__init__.py").read_text())
    said = check(tmp_path / "mirror" / "__init__.py")
    assert not ERROR.search(said), said


def written(folder: Path, text: str) -> Path:
    file = folder / "program.py"
    file.write_text(text)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    return file

"""Every public name of torch.distributed is here, with torch's signature where it is ours and torch's own object elsewhere."""

import importlib
import inspect
import operator
import pickle
import re
import sys
from typing import Any

import pytest
import torch
import torch.distributed

import mpicoll
from tests.support import ROOT, run

# Submodules of mpicoll that stand where torch.distributed has one of the same name, and why.
OWN_MODULES = {
    "run": "our launcher in the place of torchrun's",
    "nn": "our functional and halo exchange; the rest it takes from torch's",
    "rpc": "our RPC",
    "autograd": "our RPC",
    "optim": "our RPC",
}


def public(module: Any) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]


def test_every_public_name_is_here() -> None:
    missing = [name for name in public(torch.distributed) if not hasattr(mpicoll, name)]
    assert not missing
    assert set(public(torch.distributed)) | set(mpicoll.OURS) <= set(dir(mpicoll))
    assert set(getattr(torch.distributed, "__all__", [])) <= set(mpicoll.__all__)


def test_what_is_not_ours_is_torchs_own_object() -> None:
    """isinstance, except and pickle see one class, whichever door it came through."""
    for name in public(torch.distributed):
        if name not in mpicoll.OURS and name not in OWN_MODULES:
            assert getattr(mpicoll, name) is getattr(torch.distributed, name), name
    for name in ("Work", "ReduceOp", "ProcessGroup", "Backend", "Store", "TCPStore", "group", "GroupMember", "DistError"):
        assert getattr(mpicoll, name) is getattr(torch.distributed, name), name
    assert pickle.loads(pickle.dumps(mpicoll.ReduceOp.SUM)) == torch.distributed.ReduceOp.SUM


def test_the_list_of_ours_holds() -> None:
    for name, module in mpicoll.OURS.items():
        found = getattr(mpicoll, name)
        assert found is getattr(importlib.import_module(module), name), name
        assert found.__module__.partition(".")[0] == "mpicoll", name
        assert found.__doc__, name
    for module in set(mpicoll.OURS.values()):
        for name, value in vars(importlib.import_module(module)).items():
            if inspect.isfunction(value) and value.__module__ == module and hasattr(torch.distributed, name):
                assert name in mpicoll.OURS, f"{module}.{name} stands for torch's and is not in OURS"


# Rows of the table of parameters that differ: function, here, in torch, versions of torch, reason.
ROW = re.compile(r"^\| `(?P<name>\w+)` \| `?(?P<mine>.*?)`? \| `?(?P<torchs>.*?)`? \| (?P<versions>[\w. ]+) \| (?P<why>.*) \|$")
DIFFERENT = [found for line in (ROOT / "docs/reference/semantics.md").read_text().splitlines() if (found := ROW.match(line))]
TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])


def test_signatures_are_torchs_but_for_a_table() -> None:
    """Names, order, kinds and defaults of the parameters. The table has each difference, with a reason, and no other."""
    found, disordered = set(), []
    for name in mpicoll.OURS:
        if hasattr(torch.distributed, name):
            mine, torchs = signature(getattr(mpicoll, name)), signature(getattr(torch.distributed, name))
            pairs = [(spelled(mine.get(key)), spelled(torchs.get(key))) for key in {**mine, **torchs}]
            found |= {(name, *pair) for pair in pairs if pair[0] != pair[1]}
            if [key for key in mine if key in torchs] != [key for key in torchs if key in mine]:
                disordered.append(f"{name}: {list(mine)} is not {list(torchs)}")
    assert not disordered
    assert found == {(row["name"], row["mine"], row["torchs"]) for row in DIFFERENT if holds(row["versions"])}
    assert all(len(row["why"]) > 10 for row in DIFFERENT)


def spelled(parameter: inspect.Parameter | None) -> str:
    """A parameter as one writes it, without its annotation; "-" if there is none."""
    if parameter is None:
        return "-"
    mark = "*, " if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
    return mark + str(parameter.replace(annotation=inspect.Parameter.empty)).replace(" = ", "=")


def holds(versions: str) -> bool:
    """Whether torch is one of "all", "before 2.13", "from 2.14"."""
    word, _, number = versions.partition(" ")
    limit = tuple(int(part) for part in number.split(".")) if number else ()
    return {"all": True, "before": limit > TORCH, "from": limit <= TORCH}[word]


def signature(function: Any) -> dict[str, inspect.Parameter]:
    target = function.__new__ if isinstance(function, type) else function
    parameters = dict(inspect.signature(target).parameters)
    parameters.pop("cls", None)
    return parameters


@pytest.mark.parametrize(
    "name",
    [
        "fsdp", "device_mesh", "tensor", "tensor.parallel", "checkpoint", "checkpoint.state_dict", "pipelining",
        "distributed_c10d", "constants", "rendezvous", "utils", "elastic", "launcher", "c10d_logger",
        "algorithms.ddp_comm_hooks.default_hooks", "algorithms.join", "algorithms.model_averaging", "fsdp.wrap",
        "nn.jit", "nn.jit.instantiator",
    ],
)  # fmt: skip
def test_submodules_are_torchs_own(name: str) -> None:
    mine, theirs = importlib.import_module(f"mpicoll.{name}"), importlib.import_module(f"torch.distributed.{name}")
    assert mine is theirs is operator.attrgetter(name)(mpicoll)
    assert sys.modules[f"mpicoll.{name}"] is theirs
    assert mine.__name__ == f"torch.distributed.{name}"
    assert mine.__spec__ is not None
    assert mine.__spec__.name == f"torch.distributed.{name}"


def test_no_module_of_ours_hides_one_of_torchs_unnoticed() -> None:
    import pkgutil

    theirs = {module.name for module in pkgutil.iter_modules(torch.distributed.__path__)}
    ours = {module.name for module in pkgutil.iter_modules(mpicoll.__path__)}
    assert theirs & ours <= set(OWN_MODULES)


FUNCTIONAL = [
    "broadcast", "gather", "scatter", "reduce", "reduce_scatter", "all_gather", "_all_gather_base", "all_to_all",
    "all_to_all_single", "all_reduce",
]  # fmt: skip


def test_nn_has_what_torchs_has() -> None:
    """Ours where it communicates, torch's own object everywhere else; and no function that torch adds goes by unnoticed."""
    import torch.distributed.nn

    import mpicoll.nn
    from mpicoll.nn import functional

    for mine, theirs in ((mpicoll.nn, torch.distributed.nn), (functional, torch.distributed.nn.functional)):
        assert set(public(theirs)) <= set(dir(mine))
        for name in public(theirs):
            value = getattr(mine, name)
            if name in FUNCTIONAL:
                assert value.__module__ in ("mpicoll.nn.functional", "mpicoll.nn.reductions"), name
                assert value.__doc__, name
            elif name not in ("functional", "RemoteModule") and not inspect.ismodule(value):
                assert value is getattr(theirs, name), name
    defined = [
        name
        for name, value in vars(torch.distributed.nn.functional).items()
        if inspect.isfunction(value) and value.__module__ == "torch.distributed.nn.functional"
    ]
    assert set(defined) - set(FUNCTIONAL) <= {"_deprecated", "_not_supported_under_compile"}
    assert mpicoll.nn.RemoteModule is importlib.import_module("mpicoll.nn.api.remote_module").RemoteModule
    assert mpicoll.nn.RemoteModule.__module__ == "mpicoll.nn.api.remote_module"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mpicoll.nn.no_such_name


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_nn_signatures_are_torchs(name: str) -> None:
    """But for the group: torch's default is the world at the time of the import, or None; ours is always the world."""
    import torch.distributed.nn.functional

    from mpicoll.nn import functional

    mine, theirs = signature(getattr(functional, name)), signature(getattr(torch.distributed.nn.functional, name))
    assert list(mine) == list(theirs)
    for key in theirs:
        assert mine[key].kind == theirs[key].kind
        assert mine[key].default == theirs[key].default or key == "group", key
    assert mine["group"].default is None


@pytest.mark.parametrize(
    "name", ["rpc.internal", "rpc.backend_registry", "rpc.rref_proxy", "rpc._utils", "autograd.nothing", "optim.optimizer"]
)
def test_modules_of_torchs_rpc_are_refused(name: str) -> None:
    """They work on TensorPipe, so that nothing of mpicoll.rpc would be seen through them."""
    with pytest.raises(ModuleNotFoundError, match=f"mpicoll.{name}.*torch has it for its own RPC"):
        importlib.import_module(f"mpicoll.{name}")
    package, _, module = name.partition(".")
    with pytest.raises(ImportError, match=module):
        exec(f"from mpicoll.{package} import {module}", {})
    assert f"mpicoll.{name}" not in sys.modules


def test_names_that_nobody_has() -> None:
    for name in ("all_reduse", "__wrapped__", "_not_there"):
        with pytest.raises(AttributeError, match=name):
            getattr(mpicoll, name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mpicoll.no_such_module")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mpicoll.fsdp.no_such_module")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mpicoll._c10d.no_such_module")


NO_MPI = "mpi = sys.modules.get('mpi4py.MPI')\nassert mpi is None or not mpi.Is_initialized()"
IMPORTS = {
    # what `python -m mpicoll.run` needs
    "mpicoll": "import sys, mpicoll, mpicoll._base.launcher, mpicoll._base.config, mpicoll.errors\n"
    "assert not {'torch', 'mpi4py', 'numpy'} & sys.modules.keys()",
    "star": "from mpicoll import *\nassert all_reduce.__module__ == 'mpicoll._api.reductions' and ReduceOp and Work\n"
    "from mpicoll.nn import *\nassert all_reduce.__module__ == 'mpicoll.nn.reductions' and halo_exchange and RemoteModule",
    "names": f"import sys\nfrom mpicoll import {', '.join(mpicoll.OURS)}\nimport mpicoll.nn\n"
    "from mpicoll.nn import functional, halo_exchange, Grid\n"
    "assert not {'mpi4py.MPI', 'torch.distributed.nn'} & sys.modules.keys()",
    # a parent that hands its rank to a child may import it: init_rpc starts MPI, in the child
    **{
        name: f"import sys, mpicoll.{name}\n{NO_MPI}"
        for name in ("rpc", "autograd", "optim", "nn", "nn.api.remote_module", "rpc.api")
    },
}


@pytest.mark.launch
@pytest.mark.parametrize("name", IMPORTS)
def test_importing_starts_no_mpi(name: str) -> None:
    done = run([sys.executable, "-c", IMPORTS[name]])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

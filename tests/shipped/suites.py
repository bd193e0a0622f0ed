"""The classes of torch's tests, for one process that runs them all: imported over mpicoll, and with mpicoll's number of ranks."""

import contextlib
import copy
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

from torch.testing._internal import common_distributed

from mpicoll import rpc
from tests.support import session

HOME = "torch.testing._internal."

# Modules that are translated when they are imported, as docs/guides/migration.md changes a program.
TRANSLATED = tuple(
    HOME + name
    for name in (
        "dist_utils",
        "distributed.distributed_test",
        "distributed.rpc.",
        "distributed.nn.api.",
        "distributed.ddp_under_dist_autograd_test",
    )
)
IMPORTS = (
    (r"\btorch\.distributed\.(rpc(?!\.internal)|autograd|optim|nn(?!\.api))\b", r"mpicoll.\1"),
    (r"from torch\.distributed import rpc\b", "from mpicoll import rpc"),
    (r"import _thread_local_var, _use_rpc_pickler, _wait_all", "import _thread_local_var, _wait_all"),  # not there: left_out.py
    (r"if BACKEND not in backends:", 'if not {BACKEND, "gloo"} & backends:'),  # what Gloo can, mpicoll should
    (r"ModuleCreationMode\.__members__\.values\(\)", "[ModuleCreationMode.MODULE_CTOR]"),  # not from a TorchScript interface
    (r"(?m)^import torch$", "import torch; import mpicoll"),
)


class Translator(importlib.machinery.SourceFileLoader):
    """Loads a module of torch's tests, for mpicoll. The numbers of its lines stay as they are."""

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_data(self.path).decode()
        for pattern, replacement in IMPORTS:
            text = re.sub(pattern, replacement, text)
        code: CodeType = self.source_to_code(text, self.path)
        return code


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name.startswith(TRANSLATED) else None
        if spec is not None and spec.origin is not None:
            spec.loader = Translator(name, spec.origin)
        return spec


@dataclass(frozen=True)
class Suite:
    """One class of torch's tests. ranks: on which ``python -m tests.shipped`` runs it; the only ones, if ``fixed``."""

    module: str
    name: str
    ranks: tuple[int, ...] = (4,)
    fixed: bool = False

    @property
    def short(self) -> str:
        return self.name.split(".")[0]


RPC = "distributed.rpc."
REMOTE_MODULE = "distributed.nn.api.remote_module_test"
UNDER_AUTOGRAD = "distributed.ddp_under_dist_autograd_test"
SUITES = (
    Suite("distributed.distributed_test", "DistributedTest._DistTestBase", (3, 4)),
    Suite(RPC + "rpc_test", "RpcTest"),
    Suite(RPC + "rpc_test", "TensorPipeAgentRpcTest"),
    Suite(RPC + "dist_autograd_test", "DistAutogradTest"),
    Suite(RPC + "dist_autograd_test", "TensorPipeAgentDistAutogradTest"),
    Suite(RPC + "dist_optimizer_test", "DistOptimizerTest"),
    Suite(RPC + "examples.parameter_server_test", "ParameterServerTest"),
    Suite(REMOTE_MODULE, "RemoteModuleTest", (2,)),
    Suite(REMOTE_MODULE, "ThreeWorkersRemoteModuleTest", (3,), fixed=True),
    Suite(UNDER_AUTOGRAD, "DdpUnderDistAutogradTest", (6,), fixed=True),
    Suite(UNDER_AUTOGRAD, "DdpComparisonTest"),
)


@functools.cache
def load(suite: Suite) -> type[Any]:
    """The class of ``suite``, made for one rank of this session: torch's own fixtures start processes."""
    for feature in ("ddp", "subgroup"):  # torch's own MPI backend lacks these, mpicoll has them
        common_distributed.DistTestCases.backend_feature[feature].add("mpi")
    common_distributed.DistTestCases.skip_collective["allgather_coalesced"].discard("mpi")
    os.environ.update(BACKEND="mpi", WORLD_SIZE=str(session().side.size))  # read when the modules are imported
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    module = importlib.import_module(HOME + suite.module)
    found: Any = module
    for part in suite.name.split("."):
        found = getattr(found, part)
    own = {"needs_world": suite.short == "DistributedTest", "world_size": session().side.size, "__module__": module.__name__}
    made = type(f"{suite.short}OnThisRank", (OnThisRank, found, common_distributed.MultiProcessTestCase), own)
    setattr(module, made.__name__, made)  # its methods travel in calls
    return made


class OnThisRank:
    """What torch's fixtures give a test, for one rank of MPI. The runner of a test sets ``file_name``."""

    file_name: str

    def __init__(self, name: str) -> None:
        super().__init__(name)  # type: ignore[call-arg]
        self.rank = session().side.rank

    @property
    def init_method(self) -> str:
        return f"file://{self.file_name}"

    @property
    def rpc_backend(self) -> object:
        return rpc.BackendType.TENSORPIPE  # stands for MPI in mpicoll.rpc

    @property
    def rpc_backend_options(self) -> rpc.TensorPipeRpcBackendOptions:
        return rpc.TensorPipeRpcBackendOptions(init_method=self.init_method)

    @contextlib.contextmanager
    def fresh_module(self) -> Iterator[None]:
        """torch runs each test in processes of its own: what it changes in its module is changed back."""
        names = vars(sys.modules[type(self).__module__])
        before = {
            name: copy.copy(value) if isinstance(value, (dict, list, set)) else value
            for name, value in names.items()
            if not name.startswith("__")
        }
        names.update({name: Future() for name, value in before.items() if isinstance(value, Future)})  # of this test only
        if "Barrier" in names:
            names["Barrier"].barrier_id = 0
        try:
            yield
        finally:
            names.update(before)

    def get_shutdown_error_regex(self) -> str:
        return ".*"  # as torch's fixture for TensorPipe has it

    def get_timeout_error_regex(self) -> str:
        return "RPC ran for more than"

"""Every change that mpicoll makes to torch and to Python's interpreter, in one table.

`wrap`, `assign` and `replaced` make such a change, and only for a target that is in TABLE. Some files cannot use them: they
are in rooms below this one, or change the contents of a table of torch. Each entry names the file that makes its change (`home`).
A test finds every other assignment to an attribute of torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mpicoll._c10d.names import WORK_METHODS

ORIGINAL = "_mpicoll_original"  # attribute of a function that `wrap` has put in place: the function before it


class Patch(NamedTuple):
    """One change."""

    targets: tuple[str, ...]  # dotted names; a torch that lacks one is left alone
    what: str
    why: str
    when: str
    home: str  # the file that makes the change, below mpicoll/
    undone: str = "never"
    copies: tuple[str, ...] = ()  # other places that hold the same function, imported by name


C10D = "torch.distributed.distributed_c10d"
GROUP = f"{C10D}.ProcessGroup"

TABLE = (
    # -- at `import torch` -------------------------------------------------------------------------------------------------
    Patch(
        (f"{C10D}.init_process_group",),
        what="wrapper that looks at the backend string and at init_method",
        why='starts MPI for "mpi" and for mpi://; torch takes the bare name "mpi" for a backend without store and rank',
        when="import torch",
        undone="never; other calls go on as they came",
        home="_c10d/register.py",
        copies=("torch.distributed.init_process_group", "torch.distributed.device_mesh.init_process_group"),
    ),
    Patch(
        (f"{C10D}._new_group_with_tag",),
        what="wrapper that looks at the backend string",
        why="every function that makes a group ends here: new_group, new_subgroups, DeviceMesh",
        when="import torch",
        undone="never; other calls go on as they came",
        home="_c10d/register.py",
    ),
    Patch(
        (f"{C10D}.shrink_group",),
        what="wrapper that looks at the backend of the group",
        why="torch makes the new group of backends in C++ only; see `shrink`",
        when="import torch, torch >= 2.13",
        undone="never; other groups go on as they came",
        home="_c10d/register.py",
        copies=("torch.distributed.shrink_group",),
    ),
    Patch(
        (f"{C10D}._MPI_AVAILABLE",),
        what="True",
        why="is_mpi_available() reads it; see Note [When MPI is available]",
        when="import torch, in a rank that an MPI launcher started",
        home="_c10d/register.py",
    ),
    Patch(
        (f"{C10D}.Backend._plugins",),
        what="our two plugins are taken out, and are back while torch makes an mpicoll group",
        why="see Note [Hidden plugins]",
        when="import torch, torch <= 2.13",
        home="_c10d/names.py",
    ),
    Patch(
        (f"{C10D}.Backend.default_device_backend_map",),
        what="the backend of MPICOLL_BACKEND for its kinds of device",
        why="programs name the backend that get_default_backend_for_device returns",
        when="import torch, where MPICOLL_BACKEND is set (`mpicoll run --backend`)",
        home="_c10d/names.py",
    ),
    # -- with the first group ----------------------------------------------------------------------------------------------
    Patch(
        (f"{C10D}.Backend.backend_capability",),
        what='the kinds of device of "mpi"',
        why="see `names.serve`",
        when="a group is made",
        home="_c10d/names.py",
    ),
    Patch(
        tuple(f"{GROUP}.{name}" for name in WORK_METHODS),
        what="wrapper that returns our Work",
        why="see Note [The Work behind the Work]",
        when="the first mpicoll group, torch >= 2.14",
        undone="never; for other backends it returns what torch returned",
        home="_c10d/backend.py",
    ),
    Patch(
        (f"{GROUP}.gather_single", f"{GROUP}.gather_into_tensor"),
        what="wrapper that calls our backend directly",
        why="C++ does not look for these methods on a Python backend",
        when="the first mpicoll group, torch >= 2.14",
        undone="never; other backends are called as before",
        home="_c10d/backend.py",
    ),
    Patch(
        (f"{GROUP}.split_group",),
        what="wrapper that returns None on ranks outside the new group",
        why="C++ does not take None from a Python backend, which returns a stand-in there",
        when="the first mpicoll group, torch >= 2.14",
        home="_c10d/backend.py",
    ),
    Patch(
        ("torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook",),
        what="wrapper that registers torch's Python form of the FP16_COMPRESS hook for mpicoll groups",
        why="see Note [A Future that C++ cannot read]",
        when="the first mpicoll group",
        undone="never; other groups get the C++ hook",
        home="_c10d/ddp.py",
    ),
    Patch(
        ("torch._C._distributed_c10d.Reducer._set_forward_pass_work_handle",),
        what="wrapper that hands over a Work of torch's that holds our Future",
        why="see Note [A Work whose Python part is gone]",
        when="the first mpicoll group",
        undone="never; other Works go on as they came",
        home="_c10d/ddp.py",
    ),
    Patch(
        ("torch.distributed.c10d_logger._get_msg_dict",),
        what="wrapper that looks at the call that has failed",
        why="see mpicoll/_c10d/failed_calls.py",
        when="the first mpicoll group",
        undone="never; it looks at calls on mpicoll groups only",
        home="_c10d/failed_calls.py",
    ),
    Patch(
        ("torch.ops._c10d_functional.all_gather_into_tensor_out", "torch.ops._c10d_functional.batch_p2p_ops"),
        what="kernels for tensors on the CPU",
        why="the C++ ones ask the group for a backend in C++",
        when="the first mpicoll group, torch <= 2.13",
        undone="never; they serve groups of every backend",
        home="_c10d/torch213/functional_ops.py",
    ),
    # -- for a while -------------------------------------------------------------------------------------------------------
    Patch(
        (f"{C10D}._hash_ranks_to_str",),
        what="function that counts the groups of the same ranks",
        why="see Note [Names that members agree on]",
        when="torch makes a group with use_local_synchronization=True",
        undone="when that group is made",
        home="_c10d/torch_world.py",
    ),
    Patch(
        (f"{C10D}._world",),
        what="entries of its tables: a backend's name as the user gave it; no entry of a group that could not be made",
        why="see `torch_world.record_backend` and `init._undone_on_failure`",
        when="an mpicoll group is made or fails",
        undone="destroy_process_group",
        home="_c10d/torch_world.py",
    ),
    Patch(
        ("sys.excepthook", "threading.excepthook"),
        what="hook that calls the one before, then aborts the job",
        why="an exception on one rank, in any thread, would leave the others waiting",
        when="an mpicoll group is made",
        undone="the default group is destroyed",
        home="_mpi/abort.py",
    ),
    Patch(
        ("sys.__interactivehook__",),
        what="object that calls the hook before it, and ends MPI when Python deletes it",
        why="MPI must end after all functions of atexit, see Note [Who finalises]",
        when="MPI starts",
        home="_mpi/library.py",
    ),
    Patch(
        ("os._exit",),
        what="function that ends the process by SIGKILL if the status is not 0",
        why="see Note [Only a killed rank is noticed]",
        when="an mpicoll group is made, in a job that goes on when a rank dies",
        undone="the default group is destroyed",
        home="_mpi/abort.py",
    ),
    Patch(
        ("sys.excepthook",),
        what="the hook from before init_process_group",
        why="torch sets a hook of its own and never removes it",
        when="the default group is destroyed",
        undone="it is the undoing",
        home="_c10d/init.py",
    ),
    # -- on first use ------------------------------------------------------------------------------------------------------
    Patch(
        ("torch.autograd.profiler._disable_profiler",),
        what="wrapper that ends our open events first",
        why="see Note [Events under way when the profiler stops]",
        when="the first event of mpicoll in a profile",
        home="_engine/spans.py",
    ),
    Patch(
        ("torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper",),
        what="wrapper that records the module",
        why="distributed autograd must know which gradients DDP reduces",
        when="the first distributed backward pass",
        home="autograd/observed.py",
    ),
    Patch(
        ("torch._C._collect_all",),
        what="function that ends at the first error of a CallFuture",
        why="Python cannot end a Future with an error",
        when="init_rpc",
        undone="never; Futures of other kinds are still collected by C++",
        home="rpc/futures.py",
    ),
    Patch(
        ("sys.meta_path",),
        what="finder, in front of the others",
        why="gives torch.distributed's submodules their second name: mpicoll.fsdp",
        when="import mpicoll",
        undone="never; it answers for names below mpicoll only",
        home="__init__.py",
    ),
)

_BY_TARGET = {target: patch for patch in TABLE for target in patch.targets}


def wrap(target: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function by ``make(function)``, in all places of its entry; does nothing the second time.

    Raises:
        KeyError: The target is not in TABLE.
    """
    places = [resolve(place) for place in (target, *_BY_TARGET[target].copies)]
    owner, name = places[0]
    original = getattr(owner, name, None)
    if original is None or hasattr(original, ORIGINAL):
        return
    wrapper = make(original)
    setattr(wrapper, ORIGINAL, original)
    for owner, name in places:
        if getattr(owner, name, None) is original:
            setattr(owner, name, wrapper)


def applied(target: str) -> bool:
    """Whether `wrap` has replaced this function."""
    owner, name = resolve(target)
    return hasattr(getattr(owner, name), ORIGINAL)


def assign(target: str, value: object) -> None:
    """Sets an attribute.

    Raises:
        KeyError: The target is not in TABLE.
    """
    owner, name = resolve(_BY_TARGET[target].targets[0])
    setattr(owner, name, value)


@contextlib.contextmanager
def replaced(target: str, value: object) -> Iterator[None]:
    """Sets an attribute, and puts the former value back at the end."""
    owner, name = resolve(target)
    former = getattr(owner, name)
    assign(target, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


def resolve(target: str) -> tuple[Any, str]:
    """The object that holds a target, None if it has not been loaded, and the attribute's name."""
    path, _, name = target.rpartition(".")
    module = path
    rest: list[str] = []
    while module not in sys.modules and module:
        module, _, last = module.rpartition(".")
        rest.insert(0, last)
    owner: Any = sys.modules.get(module)
    for part in rest:
        owner = getattr(owner, part, None)
    return owner, name

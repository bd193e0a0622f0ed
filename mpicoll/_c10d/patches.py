"""Every change that mpicoll makes to torch and to Python's interpreter, in one table.

`wrap`, `assign` and `replaced` make such a change, and only for a target that is in TABLE. Some files cannot use them: they are
in lower packages, or change the contents of a table of torch. Each entry names the file that makes its change (`home`).
A test finds every other assignment to an attribute of torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mpicoll._c10d.names import WORK_METHODS

ORIGINAL = "_mpicoll_original"  # attribute of a function that `wrap` has put in place: the function before it
C10D = "torch.distributed.distributed_c10d"
GROUP = f"{C10D}.ProcessGroup"

# By the moment of the change and the file below mpicoll/ that makes it: the target, a dotted name, and what stands in its place,
# and why. A torch that lacks the target is left alone. Calls that do not concern mpicoll go on as they came. A change is never
# undone, unless its moment names an end.
_TABLE: dict[tuple[str, str], dict[str, str]] = {
    ("import torch", "_c10d/register.py"): {
        f"{C10D}.init_process_group": 'starts MPI if the backend string names it, or for mpi://; torch takes the bare name "mpi" '
        "for a backend without store and rank",
        f"{C10D}._new_group_with_tag": "looks at the backend string; every function that makes a group ends here: new_group, "
        "new_subgroups, DeviceMesh",
        f"{C10D}._new_process_group_helper": 'libraries call it with "mpi", where torch has a branch for its own MPI',
    },
    ("import torch, torch >= 2.13", "_c10d/register.py"): {
        f"{C10D}.shrink_group": "looks at the backend of the group; torch makes the new group of C++ backends only: `shrinking`",
    },
    ("import torch, torch <= 2.13", "_c10d/names.py"): {
        f"{C10D}.Backend._plugins": "our two plugins are there only while torch makes an mpicoll group: Note [Hidden plugins]",
    },
    ("import torch, in a rank that an MPI launcher started", "_c10d/register.py"): {
        f"{C10D}._MPI_AVAILABLE": "True; is_mpi_available() reads it: Note [When MPI is available]",
    },
    ("import torch, where MPICOLL_BACKEND is set (`mpicoll run --backend`)", "_c10d/names.py"): {
        f"{C10D}.Backend.default_device_backend_map": "that backend for its kinds of device; programs name the backend that "
        "get_default_backend_for_device returns",
    },
    ("the first mpicoll group", "_c10d/names.py"): {
        f"{C10D}.Backend.backend_capability": 'the kinds of device of "mpi": `names.serve`'
    },
    ("the first mpicoll group", "_c10d/ddp.py"): {
        "torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook": "registers torch's Python form of "
        "the FP16_COMPRESS hook: Note [A Future that C++ cannot read]",
        "torch._C._distributed_c10d.Reducer._set_forward_pass_work_handle": "hands over a Work of torch that holds our Future: "
        "Note [A Work whose Python part is gone]",
    },
    ("the first mpicoll group", "_c10d/refused_by_torch.py"): {
        "torch.distributed.c10d_logger._get_msg_dict": "looks at the call that has failed: mpicoll/_c10d/refused_by_torch.py",
    },
    ("the first mpicoll group, torch >= 2.14", "_c10d/backend.py"): {
        **{f"{GROUP}.{name}": "returns our Work: Note [The Work behind the Work]" for name in WORK_METHODS},
        f"{GROUP}.gather_single": "calls our backend directly; C++ does not look for this method on a Python backend",
        f"{GROUP}.gather_into_tensor": "the same",
        f"{GROUP}.new_window": "returns our Window; Python cannot derive a class from torch's",
        f"{GROUP}.split_group": "returns None on ranks outside the new group, where our backend returns a stand-in; C++ does not "
        "take None from a Python backend",
    },
    ("the first mpicoll group, torch >= 2.14", "_c10d/hooks.py"): {
        f"{GROUP}.{name}_{kind}_hook": "notes which groups have hooks: mpicoll's functions go through torch for them"
        for name in ("register", "unregister")
        for kind in ("pre", "post")
    },
    ("the first mpicoll group, torch <= 2.13", "_c10d/torch213/functional_ops.py"): {
        "torch.ops._c10d_functional.all_gather_into_tensor_out": "kernel for tensors on the CPU, of groups of every backend; "
        "that of C++ asks the group for a backend in C++",
        "torch.ops._c10d_functional.batch_p2p_ops": "the same",
    },
    ("the first group of several worlds", "_c10d/init.py"): {
        f"{C10D}.get_rank": "the rank in such a group; torch takes the rank in the default group for a global rank of it",
    },
    ("while torch makes a group with use_local_synchronization=True", "_c10d/torch_world.py"): {
        f"{C10D}._hash_ranks_to_str": "counts the groups of the same ranks: Note [Names that members agree on]",
    },
    ("an mpicoll group is made or fails, until destroy_process_group", "_c10d/torch_world.py"): {
        f"{C10D}._world": "entries of its tables: the name of a backend as the user gave it (`torch_world.record_backend`), and "
        "no group that could not be made",
    },
    ("MPI starts", "_mpi/library.py"): {
        "sys.__interactivehook__": "object that calls the hook before it, and ends MPI when Python deletes it: MPI must end "
        "after all functions of atexit, see Note [Who finalises]",
    },
    ("an mpicoll group is made, until the default group is destroyed", "_mpi/abort.py"): {
        "sys.excepthook": "calls the hook before it, then aborts the job: an exception of one rank would leave others waiting. "
        "The hook of torch's init_process_group, which torch never removes, goes too",
        "threading.excepthook": "the same, in any thread",
        "os._exit": "in a job that goes on when a rank dies, ends the process by SIGKILL if the status is not 0: "
        "Note [Only a killed rank is noticed]",
    },
    ("the first event of mpicoll in a profile", "_engine/spans.py"): {
        "torch.autograd.profiler._disable_profiler": "ends our open events first: "
        "Note [Events under way when the profiler stops]",
    },
    ("the first distributed backward pass", "autograd/observed.py"): {
        "torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper": "records the module; distributed autograd must "
        "know which gradients DDP reduces",
    },
    ("init_rpc", "rpc/futures.py"): {
        "torch._C._collect_all": "ends at the first error of a CallFuture, because Python cannot end a Future with an error; "
        "Futures of other kinds are still collected by C++",
    },
    ("import mpicoll", "__init__.py"): {
        "sys.meta_path": "a finder in front of the others gives torch.distributed's submodules their second name, mpicoll.fsdp; "
        "it answers for names below mpicoll only",
    },
}


class Patch(NamedTuple):
    """One change: an entry of the table above."""

    target: str
    home: str
    when: str


TABLE = [Patch(target, home, when) for (when, home), targets in _TABLE.items() for target in targets]

# Other places that hold the same function, imported by name.
_COPIES = {
    f"{C10D}.init_process_group": ("torch.distributed.init_process_group", "torch.distributed.device_mesh.init_process_group"),
    f"{C10D}.shrink_group": ("torch.distributed.shrink_group",),
    f"{C10D}.get_rank": ("torch.distributed.get_rank", "torch.distributed.device_mesh.get_rank", "mpicoll.get_rank"),
}
_PLACES = {patch.target: (patch.target, *_COPIES.get(patch.target, ())) for patch in TABLE}


def wrap(target: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function by ``make(function)``, in all places of its entry; does nothing the second time.

    Raises:
        KeyError: The target is not in TABLE.
    """
    places = [resolve(place) for place in _PLACES[target]]
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
    owner, name = resolve(_PLACES[target][0])
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

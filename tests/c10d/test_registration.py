"""What `import torch` does with mpicoll installed: little, silently, whatever the state of MPI."""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpicoll._base import launcher
from mpicoll._c10d import names, register
from tests.support import run


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-c", code], timeout_s=60, env=env)


def test_names_of_one_backend_among_others() -> None:
    """tests/c10d/test_groups.py makes worlds by the other names."""
    assert names.translate("CPU:MPI,cuda:nccl") == "cpu:mpicoll,cuda:nccl"
    assert names.translate("cpu:gloo,cuda:nccl") is None


def test_torch_knows_us() -> None:
    launched = launcher.started_by_mpi()
    assert dist.is_mpi_available() is launched
    assert dist.is_backend_available("mpicoll")
    for name in ("mpi", "cpu:mpi,cuda:mpi"):
        assert dist.is_backend_available(name) is launched
    assert c10d.Backend.default_device_backend_map["cpu"] == "gloo"
    assert c10d.Backend.default_device_backend_map["cuda"] == "nccl"


def test_signatures_are_torchs() -> None:
    assert dist.init_process_group is c10d.init_process_group
    names = list(inspect.signature(dist.init_process_group).parameters)
    assert names[:6] == ["backend", "init_method", "timeout", "world_size", "rank", "store"]
    assert dist.init_process_group.__name__ == "init_process_group"
    assert dist.init_process_group.__doc__.strip().startswith("Initialize the default distributed")  # type: ignore


def test_registering_twice_changes_nothing() -> None:
    before = (c10d.init_process_group, c10d._new_group_with_tag, list(c10d.Backend.backend_list))
    register.autoload()
    register.ensure()
    assert before == (c10d.init_process_group, c10d._new_group_with_tag, list(c10d.Backend.backend_list))


@pytest.mark.launch
def test_import_torch_is_silent_and_starts_nothing() -> None:
    code = (
        "import sys, torch; bad = [m for m in sys.modules if m.split('.')[0] in ('mpi4py', 'numpy_mpi')"
        " or m.startswith(('mpicoll._engine', 'mpicoll._mpi', 'mpicoll._api', 'mpicoll._c10d.init'))];"
        " assert not bad, bad; assert 'mpicoll._c10d.register' in sys.modules;"
        " assert hasattr(torch.distributed.init_process_group, '_mpicoll_original')"
    )
    for env in ({}, {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}, {"MPICOLL_OVERRIDE_MPI": "perhaps"}):
        done = python(code, **env)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done


@pytest.mark.launch
@pytest.mark.parametrize("enabled", [True, False])
def test_loading_our_modules_starts_no_full_collection(enabled: bool) -> None:
    """With the objects of torch, one takes 0.1 s, a third of init_process_group."""
    code = (
        "import gc, torch.distributed as dist; full = []; "
        f"None if {enabled} else gc.disable(); "
        "gc.callbacks.append(lambda phase, facts: full.append(phase) if facts['generation'] == 2 else None); "
        "dist.init_process_group('mpi'); print(full, gc.isenabled()); dist.destroy_process_group()"
    )
    done = python(code)
    assert (done.returncode, done.stdout) == (0, f"[] {enabled}\n"), done


RARE = "_c10d.shrinking", "_c10d.windows", "_device.collectives", "_launch", "autograd", "nn", "optim", "rpc"


@pytest.mark.launch
def test_the_start_loads_no_files_that_a_world_of_cpus_does_not_need() -> None:
    """Each file takes 0.4 ms of every rank's start. On loopback no host name is resolved. 121 files, and 13 at `import torch`."""
    assert all(importlib.util.find_spec(f"mpicoll.{name}") for name in RARE)
    code = f"""
import sys, torch, mpicoll
mpicoll.init_process_group("mpi")
mpicoll.all_reduce(torch.ones(2))
files = {{name for name in sys.modules if name.startswith("mpicoll")}}
print([name for name in {RARE} if f"mpicoll.{{name}}" in files], "encodings.idna" in sys.modules, len(files) <= 121)
mpicoll.destroy_process_group()
"""
    done = python(code, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (0, "[] False True\n"), done


@pytest.mark.launch
def test_import_torch_does_little_more() -> None:
    """12 files at about 0.2 ms and 2,250 calls of Python functions: 4 ms. Counted, because times depend on the machine's load."""
    code = """
import sys, torch
before, calls = set(sys.modules), []
sys.setprofile(lambda frame, event, argument: calls.append(event == "call"))
import mpicoll._c10d.register
mpicoll._c10d.register.autoload()
sys.setprofile(None)
files = set(sys.modules) - before
print(sum(calls), len(files), all(name.split(".")[0] == "mpicoll" for name in files))
"""
    done = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    calls, files, ours = done.stdout.split()
    assert (int(calls) < 3000, int(files) <= 12, ours) == (True, True, "True"), done


@pytest.mark.launch
def test_a_failure_is_kept_for_the_one_who_asks() -> None:
    code = """
import sys
from pathlib import Path
sys.modules["mpicoll._base.launcher"] = None
import torch
import torch.distributed as dist
print("imported")
try:
    dist.init_process_group("mpi")
except RuntimeError as error:
    print(type(error).__name__, error, type(error.__cause__).__name__)
"""
    done = python(code)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, lines[0]) == (0, "", "imported"), done
    assert "could not register" in lines[1], done
    assert "mpicoll._base.launcher" in lines[1], done


@pytest.mark.launch
def test_a_torch_with_an_mpi_of_its_own_keeps_the_name() -> None:
    """trap 58."""
    code = (
        "import torch.distributed.distributed_c10d as c; c._MPI_AVAILABLE = True; from mpicoll._c10d import names, register;"
        " register.autoload(); print(names.translate('mpi'), names.translate('mpicoll'))"
    )
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert python(code, **env).stdout.split() == ["None", "mpicoll"]
    assert python(code, **env, MPICOLL_OVERRIDE_MPI="1").stdout.split() == ["mpicoll", "mpicoll"]


@pytest.mark.launch
def test_gloo_users_see_no_difference(tmp_path: Path) -> None:
    """A plugin in torch 2.13's table makes destroy_process_group warn in groups of gloo alone."""
    code = (
        "import torch, torch.distributed as d;"
        f" d.init_process_group('cpu:gloo,cuda:gloo', store=d.FileStore('{tmp_path}/s', 1), rank=0, world_size=1);"
        " d.all_reduce(torch.ones(1)); g = d.new_group(); d.destroy_process_group();"
        " import sys; assert 'mpi4py' not in sys.modules"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done

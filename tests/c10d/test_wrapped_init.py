"""Programs and libraries that put a function of their own round torch's init_process_group."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import mpicoll
from mpicoll._c10d import register
from tests.support import LAUNCH_ENVIRONMENT, agree, mpiexec, run

seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []


def by_keywords(inner: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(backend: str | None = None, **kwargs: Any) -> None:
        seen.append(((backend,), kwargs))
        inner(backend, **kwargs)

    return init_process_group


def by_anything(inner: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))
        inner(*args, **kwargs)

    return init_process_group


@pytest.fixture(params=[by_keywords, by_anything])
def patched(request: pytest.FixtureRequest, no_world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen.clear()
    mine = request.param(c10d.init_process_group)
    monkeypatch.setattr(c10d, "init_process_group", mine)
    monkeypatch.setattr(dist, "init_process_group", mine)


def check(size: int) -> None:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    agree((dist.get_backend(), dist.get_world_size(), float(tensor)) == ("mpi", size, size), (dist.get_backend(), tensor))
    dist.destroy_process_group()


@pytest.mark.usefixtures("patched")
def test_a_program_that_wraps_it(size: int) -> None:
    """Through torch's name, and through ours, which registers anew: "unexpected keyword argument 'kwargs'"."""
    for _ in range(2):
        dist.init_process_group("mpi", group_name="")
        check(size)
        mpicoll.init_process_group()
        check(size)
        mpicoll.init_process_group("mpi", group_name="")
        check(size)
    register.ensure()
    c10d.init_process_group("mpi", group_name="")
    check(size)
    assert len(seen) == 7
    with pytest.raises(TypeError, match="nonsense"):
        dist.init_process_group("mpi", nonsense=1)  # type: ignore[call-arg]


@pytest.mark.launch
def test_one_that_was_there_before_us() -> None:
    code = """
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
inner = c10d.init_process_group
def patched(*args, **kwargs):
    print(args, sorted(kwargs))
    inner(*args, **kwargs)
c10d.init_process_group = dist.init_process_group = patched
import mpicoll
for args, kwargs in [(("mpi",), {}), ((), {"backend": "mpi"}), (("mpi", None), {})]:
    mpicoll.init_process_group(*args, **kwargs)
    print(dist.get_backend(), dist.get_world_size())
    dist.destroy_process_group()
    dist.init_process_group(*args, **kwargs)
    dist.destroy_process_group()
try:
    dist.init_process_group("mpi", backend="mpi")
except TypeError as error:
    print(error)
"""
    done = run([sys.executable, "-c", code], env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("mpi 1") == 3, lines
    assert sum(line.startswith("('mpicoll',") for line in lines) == 5, lines  # of six; ours passes every backend by place
    assert "multiple values for argument 'backend'" in lines[-1], lines


def test_no_backend_is_named(no_world: None, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mpicoll run --backend mpi``: for programs that name no backend; those that name one keep it."""
    monkeypatch.setenv("MPICOLL_BACKEND", "mpi")
    dist.init_process_group()
    check(size)
    mesh = dist.init_device_mesh("cpu", (size,))
    agree((mesh.size(), dist.get_backend(mesh.get_group())) == (size, "mpi"))
    check(size)
    monkeypatch.setenv("MPICOLL_BACKEND", "gloo")
    with pytest.raises(ValueError, match="MPICOLL_BACKEND='gloo' is not allowed; use one of mpi, cpu:mpi,cuda:nccl"):
        dist.init_process_group()
    monkeypatch.setenv("MPICOLL_BACKEND", "mpi")
    dist.init_process_group("gloo", init_method="mpi://")
    agree(dist.get_backend() == "gloo", dist.get_backend())
    dist.destroy_process_group()


@pytest.mark.launch
def test_a_program_takes_the_default_of_the_device() -> None:
    """``init_process_group(get_default_backend_for_device("cpu"))``, as in PyTorch's examples; Lightning reads the same table."""
    code = """
import torch.distributed as dist
backend = dist.get_default_backend_for_device("cpu")
dist.init_process_group(backend, init_method="mpi://")
print(backend, dist.get_backend())
dist.destroy_process_group()
"""
    for named, expected in ((None, "gloo gloo"), ("cpu:mpi,cuda:nccl", "mpi mpi"), (" MPI", "mpi mpi")):
        done = run([sys.executable, "-c", code], env={} if named is None else {"MPICOLL_BACKEND": named})
        assert (done.returncode, done.stdout.strip()) == (0, expected), (named, done.stdout, done.stderr)


@pytest.mark.launch
def test_run_names_the_backend(tmp_path: Path) -> None:
    script = tmp_path / "mesh.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "mesh = dist.init_device_mesh('cpu', (2,))\n"
        "ones = torch.ones(1); dist.all_reduce(ones)\n"
        "print(f'{dist.get_backend()} {dist.get_rank()} of {dist.get_world_size()}: {ones.item():g}\\n', end='', flush=True)\n"
    )
    command = [sys.executable, "-m", "mpicoll.run", "--quiet", "-n", "2", "--backend", "mpi", str(script)]
    done = run(command, timeout_s=60, env=LAUNCH_ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["mpi 0 of 2: 2", "mpi 1 of 2: 2"], done.stdout
    refused = run([*command[:6], "--backend", "gloo", str(script)])
    assert refused.returncode == 2
    assert "--backend" in refused.stderr


@pytest.mark.launch
def test_gloo_by_name_is_mpi() -> None:
    """MPICOLL_REPLACE_GLOO, for packages that write backend="gloo" in their own code. Gloo itself has no place to meet here."""
    code = """
import torch, torch.distributed as dist
from mpicoll import get_comm
dist.init_process_group("cpu:gloo" if torch.__version__ >= "2.14" else "gloo")
reverse, mixed = dist.new_group([1, 0], backend="gloo"), dist.new_group(backend="cpu:gloo,cuda:gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
dist.all_reduce(ones, group=reverse)
dist.monitored_barrier(reverse)
sizes = get_comm(reverse).Get_size(), get_comm(mixed).Get_size()
print(f"{ones.item():g} {dist.get_backend(reverse)} {sizes}\\n", end="", flush=True)
dist.destroy_process_group()
"""
    command = [mpiexec(), "-n", "2", "env", "-u", "MASTER_ADDR", "-u", "MASTER_PORT", sys.executable, "-c", code]
    done = run(command, timeout_s=60, env={**LAUNCH_ENVIRONMENT, "MPICOLL_REPLACE_GLOO": "1"})
    assert (done.returncode, done.stdout.splitlines()) == (0, ["4 gloo (2, 2)"] * 2), done.stdout + done.stderr

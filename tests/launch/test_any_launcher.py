"""Worlds without an MPI launcher: processes of mp.spawn, mp.Process and torchrun; and the parts of which these are made."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from torch.distributed import HashStore

from mpicoll._base import processes
from mpicoll._base.cpus import longer
from mpicoll._base.errors import LaunchError
from mpicoll._c10d.store_world import Gather
from mpicoll._launch import placeholders
from mpicoll._launch.pmi import OTHER, Server, mapping
from mpicoll._launch.rank_connections import ENDED, Liveness
from tests.support import LAUNCH_ENVIRONMENT, clean_environment, free_port, is_open_mpi

SCRIPT = str(Path(__file__).with_name("scripts") / "as_gloo.py")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")


def start(*words: str, **environ: str) -> subprocess.Popen[str]:
    environ = {**clean_environment(), **LAUNCH_ENVIRONMENT, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.Popen([sys.executable, *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*words: str, **environ: str) -> tuple[int, str, str]:
    """Status, standard output and standard error of ``python words...``, in a job that must leave no process behind."""
    process = start(*words, **environ)
    try:
        out, errors = process.communicate(timeout=longer(80))  # open as long as a process of the job lives
    finally:
        process.kill()
    return process.returncode, out, errors


def all_removed(errors: str) -> bool:
    """Whether the files of shared memory are gone that the ranks of as_gloo.py have named."""
    files = {name for line in errors.splitlines() if line.startswith("maps ") for name in line.split()[1:]}
    assert files, errors
    return not any(os.path.exists(file) for file in files)


# -- jobs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.launch
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("program", "how", "size", "line", "api"),
    [
        *[
            (*case, api)
            for case in [
                ("p2p", "spawn", 2, "has 3"),
                ("collectives", "fork", 3, "right"),
                ("ddp", "mp.spawn", 2, "as one process"),
            ]
            for api in ("torch", "mpicoll")
        ],
        ("beside", "fork", 2, "gloo and mpi", "torch"),
    ],
)
def test_programs_of_the_tutorials(program: str, how: str, size: int, line: str, api: str) -> None:
    """As they stand, but for the word "mpi", under plain python. Collectives: the ranks meet in four ways."""
    status, out, errors = run(SCRIPT, program, how, str(size), API=api)
    times = 4 if program == "collectives" else 1
    assert status == 0, errors
    assert sorted(out.splitlines()) == sorted(f"rank {rank} of {size}: {line}" for rank in range(size) for _ in range(times)), (
        errors
    )


@pytest.mark.launch
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["fork", "mp.spawn"])
@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("kill", -9, ENDED),
        ("raise", 1, "ValueError: rank 1 has had enough"),
        ("exit", 3, "exit status 3"),
        ("abort", 7, ENDED if is_open_mpi() else "has called MPI_Abort: 7"),
    ],
)
def test_a_failing_rank_ends_the_others(fault: str, status: int, says: str, how: str) -> None:
    """The others wait for it in a barrier. mp.spawn raises the error of the rank that failed, as with Gloo."""
    ended, out, errors = run(SCRIPT, fault, how)
    assert ended == 1, errors
    assert all_removed(errors)
    if how == "fork":
        assert f"mpicoll: rank 1 of 2 {says}; the other ranks end, too" in errors
        assert out == f"ended 1 {status}\n", errors
    else:
        raised = {"raise": "ValueError: rank 1 has had enough", "kill": "signal SIGKILL"}
        assert raised.get(fault, f"process 1 terminated with exit code {status}") in errors


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_ctrl_c_ends_all() -> None:
    process = start(SCRIPT, "sleep", "fork")
    assert process.stdout is not None
    for _ in range(2):
        assert "sleeps" in process.stdout.readline()
    ranks = processes.children(process.pid)
    for pid in [process.pid, *ranks]:  # the terminal signals the whole group
        os.kill(pid, signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=longer(30))
    assert time.monotonic() - began < longer(15)
    assert len(ranks) >= 2


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_torchrun_and_its_restarts() -> None:
    """The second attempt meets at the store of the first one, which torchrun keeps."""
    status, out, errors = run(*TORCHRUN, "2", "--max-restarts", "1", "--master-port", str(free_port()), SCRIPT, "restart", "run")
    assert status == 0, errors
    assert sorted(out.splitlines()) == ["rank 0 of 2: right", "rank 1 of 2: right"], errors
    assert all_removed(errors)


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_a_rank_that_does_not_come_is_named() -> None:
    code = "import datetime, torch.distributed as d; d.init_process_group('mpi', timeout=datetime.timedelta(seconds=2))"
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    for rank, missing in (("0", "1, 2"), ("2", "0")):
        status, _, errors = run("-c", code, RANK=rank, **place)
        assert status == 1
        assert f"OperationTimeout: init_process_group: Timed out: rank {missing} did not come within the timeout of 2 s" in errors


@pytest.mark.launch
def test_a_world_of_one_leaves_no_shared_memory() -> None:
    """Open MPI leaves a segment when a process that no mpirun has started ends, also one of mpi4py alone."""
    code = "import sys, torch.distributed as d; d.init_process_group('mpi'); sys.stderr.write(open('/proc/self/maps').read())"
    status, _, errors = run("-c", code)
    files = [line.split()[5] for line in errors.splitlines() if "/dev/shm/" in line]
    assert status == 0, errors
    assert files or not is_open_mpi()
    assert not any(os.path.exists(file) for file in files)


# -- parts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("aabb", "(vector,(0,1,2),(1,1,2))"),
        ("abab", "(vector,(0,1,1),(1,1,1),(0,1,1),(1,1,1))"),
        ("aaaa", "(vector,(0,1,4))"),
    ],
)
def test_where_the_ranks_are(hosts: str, text: str) -> None:
    assert mapping(hosts) == text


def test_the_protocol_of_64_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """PMI-1 as MPICH speaks it, with a fake MPI for each server."""
    size, store, failed = 64, HashStore(), list[Any]()
    for name in ("PMI_FD", "PMI_RANK", "PMI_SIZE", "PMI_JOBID", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"):
        monkeypatch.setenv(name, "")
    hosts = [f"host{rank // 16}" for rank in range(size)]
    ends, servers = [], []
    for rank in range(size):
        servers.append(Server(rank, "kvs", hosts, Gather(store, rank, size), lambda *words: failed.append(words)))
        ends.append(socket.socket(fileno=int(os.environ["PMI_FD"])))
        assert (os.environ["MPI_LOCALRANKID"], os.environ["MPI_LOCALNRANKS"]) == (str(rank % 16), "16")

    def ask(rank: int) -> None:
        with ends[rank] as connection, connection.makefile("r") as answers:

            def call(line: str) -> str:
                connection.sendall(f"cmd={line}\n".encode())
                return answers.readline().rstrip("\n")

            assert call("init pmi_version=1 pmi_subversion=1") == "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            assert call("get_maxes") == "cmd=maxes kvsname_max=256 keylen_max=256 vallen_max=4096 rc=0"
            assert call("get_universe_size") == "cmd=universe_size size=64 rc=0"
            assert call("get_my_kvsname") == "cmd=my_kvsname kvsname=kvs rc=0"
            assert call("get kvsname=kvs key=PMI_process_mapping").endswith(f"value={mapping(hosts)}")
            assert call("get kvsname=kvs key=none") == "cmd=get_result rc=-1 msg=not_found value=unknown"
            assert call(f"put kvsname=kvs key=card-{rank} value=#{rank}=$tcp") == "cmd=put_result rc=0 msg=success"
            assert call("barrier_in") == "cmd=barrier_out rc=0"
            for other in (0, rank, size - 1):
                assert call(f"get kvsname=kvs key=card-{other}") == f"cmd=get_result rc=0 msg=success value=#{other}=$tcp"
            assert call("barrier_in") == "cmd=barrier_out rc=0"
            assert call("publish_name service=x") == "cmd=publish_name_result rc=-1 msg=not_supported"
            if rank == 5:
                call("abort exitcode=9")
            assert call("finalize") == "cmd=finalize_ack rc=0"
            servers[rank].stop()
            assert answers.readline() == "cmd=finalize_ack rc=0\n"  # in advance: MPI asks again in exit()

    with ThreadPoolExecutor(size) as threads:
        assert list(threads.map(ask, range(size), timeout=60)) == [None] * size
    assert failed == [("has called MPI_Abort: 9", 9)]
    assert store.num_keys() == 2 * (size + 2)  # two barriers


class CountingStore:
    """A store of torch that counts the requests."""

    def __init__(self) -> None:
        self.store, self.requests, self.guard = HashStore(), Counter[str](), threading.Lock()

    def __getattr__(self, name: str) -> Any:
        with self.guard:
            self.requests[name] += 1
        return getattr(self.store, name)


def test_requests_of_1024_ranks() -> None:
    """The figures of the guide of launching: what one barrier of PMI asks of the store."""
    size, card = 1024, "card=" + "x" * 60
    store = CountingStore()
    ranks = [Gather(store, rank, size) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(lambda rank: rank(card), ranks, timeout=60))
    assert found == [[card] * size] * size
    assert store.requests == {"set": size + 1, "add": size, "multi_get": 1, "wait": size, "get": size}
    assert store.store.num_keys() == size + 2
    assert len(store.store.get("1/all")) < 72 * size  # each rank reads all addresses


def test_another_pmi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an MPI that was built for Slurm's PMI-2 begins."""
    for name in ("PMI_FD", "PMI_RANK", "PMI_SIZE", "PMI_JOBID", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"):
        monkeypatch.setenv(name, "")
    failed = Queue[tuple[str, int]]()
    server = Server(0, "kvs", ["host"], list, lambda *words: failed.put(words))
    with socket.socket(fileno=int(os.environ["PMI_FD"])) as connection:
        connection.sendall(b"cmd=init pmi_version=2 pmi_subversion=0\n")
        why, status = failed.get(timeout=20)
        connection.recv(100)
        assert (why, status) == (OTHER, 1)
    server.stop()  # MPI has closed its end


def met(
    size: int, come: int, limit_s: float, lost: Callable[[int, int, str], None]
) -> tuple[list[Liveness], list[dict[int, str]]]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with socket.create_connection(address) as stranger:
        stranger.sendall(b'["guess", 1, "host"]\n')
        ranks = [Liveness(rank, lambda gone, why, rank=rank: lost(rank, gone, why)) for rank in range(come)]
        with ThreadPoolExecutor(come) as threads:
            others = [threads.submit(rank.connect, address, "key", "host1", 20) for rank in ranks[1:]]
            first = ranks[0].accept(listener, "key", "host0", size, limit_s)
            return ranks, [first, *(other.result() for other in others)]


def test_placeholders_end_their_variables_by_a_line_that_is_none() -> None:
    """A program may have a variable END."""
    lines = ["0 END=1\n", "1 OMPI_A=b\n", "1 HOME=/\n", "1 =END\n", "0 OMPI_A=c=d\n", "0 =END\n", "left\n"]
    assert placeholders._variables(lines, 2) == [{"OMPI_A": "c=d"}, {"OMPI_A": "b"}]
    with pytest.raises(LaunchError):
        placeholders._variables(lines[:-2], 2)


def test_ranks_meet_and_see_an_end() -> None:
    heard = dict[int, tuple[int, str]]()
    all_have, told = threading.Event(), threading.Barrier(3, lambda: all_have.set())

    def lost(rank: int, gone: int, why: str) -> None:
        heard[rank] = gone, why
        told.wait(20)

    ranks, hosts = met(4, 4, 20, lost)
    assert hosts == [{0: "host0", 1: "host1", 2: "host1", 3: "host1"}] * 4
    for rank in ranks[:3]:
        rank.start()
    ranks[3]._connections._forget()  # closes its connections, as the kernel does for a killed process
    assert all_have.wait(20)
    assert heard == dict.fromkeys(range(3), (3, ENDED))


def test_ranks_that_have_ended_well_are_not_lost() -> None:
    heard = list[object]()
    ranks, _ = met(2, 2, 20, lambda *words: heard.append(words))
    for rank in ranks:
        rank.start()
    ranks[1].stop(1)
    ranks[0].stop(20)
    ranks[1]._thread.join(20)  # has heard the other's end
    ranks[1]._connections._forget()
    assert heard == []


def test_all_know_who_has_not_come() -> None:
    _, hosts = met(4, 2, 0.5, lambda *_: None)
    assert hosts == [{0: "host0", 1: "host1"}] * 2


def test_names_of_shared_memory_go_at_once(tmp_path: Path) -> None:
    """A killed job would leave them."""
    for name in ("mpich_shm_1_0", "other"):
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
    with (tmp_path / "mpich_shm_1_0").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        processes.unlink_mapped(folder=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["other"]
        assert memory[0] == 0

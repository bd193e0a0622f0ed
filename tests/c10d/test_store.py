"""torch's store over MPI: the same answers on every rank, without a port."""

import itertools
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import mpicoll
from mpicoll._c10d import store
from mpicoll._faults.questions import KEYS, Answer, Question
from mpicoll._mpi.library import MPI
from tests.c10d.test_rendezvous import listening
from tests.launch.jobs import run
from tests.support import agree, everyone

SHORT = timedelta(seconds=0.2)


pytestmark = pytest.mark.skipif("config.getoption('--as-if-gpus')", reason="where a rank sees a GPU, the store is torch's")


@pytest.fixture
def shared() -> Iterator[Any]:
    """The store of a new world."""
    if mpicoll.is_initialized():
        mpicoll.destroy_process_group()
    mpicoll.init_process_group("mpi")
    yield distributed_c10d._get_default_store()
    everyone("has asked")
    mpicoll.destroy_process_group()


@pytest.mark.parametrize("door", [mpicoll, dist], ids=["mpicoll", "torch"])
@pytest.mark.parametrize("method", [None, "env://", "mpi://"])
def test_a_world_of_mpi_alone_opens_no_port(no_world: None, door: Any, method: str | None) -> None:
    before = listening()
    door.init_process_group("mpi", init_method=method)
    tensor = torch.ones(2)
    door.all_reduce(tensor)
    door.barrier(door.new_group())
    distributed_c10d._get_default_store().set("key", "value")
    agree(tensor[0] == dist.get_world_size() and listening() <= before, listening() - before)


def test_a_communicator_of_the_user_needs_no_port(no_world: None, rank: int, size: int) -> None:
    before, comm = listening(), MPI.COMM_WORLD.Split(0, -rank)
    mpicoll.init_process_group(comm=comm)
    shared = distributed_c10d._get_default_store()
    shared.set(f"of {mpicoll.get_rank()}", str(rank))
    values = [shared.get(f"of {each}").decode() for each in range(size)]
    agree(values == [str(each) for each in reversed(range(size))] and listening() <= before, values)
    mpicoll.destroy_process_group()
    comm.Free()


def test_the_timeout_of_the_world_is_that_of_the_store(no_world: None) -> None:
    mpicoll.init_process_group("mpi", timeout=timedelta(minutes=77))
    found = distributed_c10d._get_default_store().timeout
    agree(found == timedelta(minutes=77), found)


def test_each_method_of_a_store_in_python_answers_every_rank_as_torchs_does(shared: Any, rank: int) -> None:
    """Each rank has keys of its own. HashStore is torch's."""
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("set", ("a", "one")), ("get", ("a",)), ("set", ("a", b"\xff\x00")), ("get", ("a",)),
        ("add", ("n", 5)), ("add", ("n", -2)), ("get", ("n",)), ("add", ("a", 1)),
        ("append", ("text", "ab")), ("append", ("text", "cd")), ("get", ("text",)),
        ("compare_set", ("a", "other", "new")), ("compare_set", ("new", "", "first")), ("compare_set", ("new", "first", "next")),
        ("compare_set", ("absent", "expected", "new")), ("check", (["a", "n"],)), ("check", (["a", "absent"],)),
        ("multi_set", (["x", "y"], ["1", "2"])), ("multi_get", (["x", "y", "a"],)), ("wait", (["x", "y"],)),
        ("wait", (["x"], SHORT)),
        ("delete_key", ("a",)), ("delete_key", ("a",)), ("check", (["a"],)), ("wait", (["a"], SHORT)), ("has_extended_api", ()),
    ]  # fmt: skip
    found = [answers(dist.PrefixStore(f"{rank}", shared), calls), answers(dist.HashStore(), calls)]
    agree(found[0] == found[1], found)


def answers(of: Any, calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """What the calls return, or the class of what they raise."""
    found = list[Any]()
    for name, arguments in calls:
        try:
            found.append(getattr(of, name)(*arguments))
        except Exception as error:  # noqa: BLE001
            found.append(type(error))
    return found


def test_all_ranks_see_the_same_keys(shared: Any, rank: int, size: int) -> None:
    shared.set(f"of {rank}", str(rank))
    values = [shared.get(f"of {each}").decode() for each in range(size)]
    total = shared.add("total", rank)
    everyone("has added")
    agree(values == [str(each) for each in range(size)] and total <= sum(range(size)))
    agree(shared.add("total", 0) == sum(range(size)) and shared.num_keys() == size + 1, shared.num_keys())


@pytest.mark.parametrize("setter", [0, -1], ids=["rank 0", "the last rank"])
def test_who_waits_gets_a_key_that_comes_later(shared: Any, rank: int, size: int, setter: int) -> None:
    setter %= size
    if rank == setter:
        time.sleep(0.3)
        shared.set("late", "value")
    since = time.monotonic()
    shared.wait(["late"], timedelta(0))  # without a limit
    value = shared.get("late")
    agree(value == b"value" and time.monotonic() - since < 5)


def test_a_wait_ends_with_torchs_error_which_names_the_key(shared: Any, rank: int) -> None:
    since = time.monotonic()
    with pytest.raises(dist.DistStoreError) as caught:
        shared.wait(["key of nobody"], SHORT)
    took_s = time.monotonic() - since
    agree(0.15 < took_s < 5 and (rank == 0 or "key of nobody" in str(caught.value)), (took_s, str(caught.value)))


def test_a_thread_that_waits_keeps_no_other_waiting(shared: Any, rank: int) -> None:
    waits = threading.Thread(target=shared.get, args=(f"later {rank}",))
    waits.start()
    shared.set(f"later {rank}", "")
    waits.join(20)
    agree(not waits.is_alive())


def test_threads_of_a_rank_ask_at_the_same_time(shared: Any, rank: int, size: int) -> None:
    threads = [threading.Thread(target=lambda: [shared.add("sum", 1) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everyone("has added")
    agree(shared.add("sum", 0) == 80 * size)


@pytest.mark.min_ranks(2)  # one rank has a HashStore
def test_no_rank_has_what_torch_gives_no_class_in_python(shared: Any) -> None:
    """Rank 0 had queues, in a HashStore of its own, and the other ranks had none."""
    for name, *arguments in (("queue_push", "q", b"v"), ("queue_pop", "q"), ("queue_len", "q"), ("list_keys",)):
        with pytest.raises(NotImplementedError, match="support is not implemented"):
            getattr(shared, name)(*arguments)
    agree(True)


def test_a_large_value(shared: Any, rank: int) -> None:
    """Rank 0 slept longer and longer while a value was under way, which moves only while it calls MPI."""
    value = bytes(8 << 20)
    shared.set(f"of {rank}", value)
    everyone("has set")
    since = time.monotonic()
    right = shared.get(f"of {rank}") == value
    agree(right and time.monotonic() - since < 20, time.monotonic() - since)


def test_a_store_of_an_old_world_says_so(shared: Any, rank: int, size: int) -> None:
    """Nothing of it is in the next world, either."""
    shared.set(f"of {rank}", "old")
    everyone("has set")
    mpicoll.destroy_process_group()
    mpicoll.init_process_group("mpi")
    new = distributed_c10d._get_default_store()
    agree(not new.check([f"of {rank}"]))
    if rank != 0:
        with pytest.raises(dist.DistStoreError, match="get: the process group of this store has been destroyed"):
            shared.get(f"of {rank}")


@pytest.mark.parametrize("asks", ["before", "after"])
def test_what_rank_0_says_when_it_has_destroyed_the_group_first(no_world: None, rank: int, size: int, asks: str) -> None:
    """A rank that waits hears it at once, and so does one that asks later: it waited for its limit."""
    mpicoll.init_process_group("mpi")
    shared = distributed_c10d._get_default_store()
    everyone("has begun")
    if rank == 0:
        time.sleep(0.3 if asks == "before" else 0)
        mpicoll.destroy_process_group()
    else:
        time.sleep(0 if asks == "before" else 0.3)
        with pytest.raises(dist.DistStoreError, match="wait: rank 0 has destroyed the process group of this store"):
            shared.wait(["never"], timedelta(seconds=60))
        mpicoll.destroy_process_group()


def test_a_store_of_the_caller_is_kept(no_world: None, rank: int, size: int) -> None:
    own = dist.HashStore()
    mpicoll.init_process_group("mpi", store=own, rank=rank, world_size=size)
    found = distributed_c10d._get_default_store().underlying_store
    agree(found is own, found)


def test_groups_of_gloo_meet_there(shared: Any, rank: int, size: int) -> None:
    group = dist.new_group(backend="gloo")
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    dist.monitored_barrier(group)
    agree(tensor.tolist() == [size] * 2)


AT_THE_END = """
import time, torch.distributed as dist
from torch.distributed import distributed_c10d
dist.init_process_group("mpi")
store = distributed_c10d._get_default_store()
if dist.get_rank() == 0: store.set("left", "by rank 0")
else:
    time.sleep(1)
    print(store.get("left").decode(), flush=True)
"""


@pytest.mark.launch
def test_rank_0_answers_until_all_programs_have_ended(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "-c", AT_THE_END, OMP_NUM_THREADS="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "by rank 0\n", "")


@pytest.mark.launch
def test_rank_0_answers_at_its_end_when_it_has_destroyed_the_group(tmp_path: Path) -> None:
    """Another rank waited for its whole limit. It gets the keys that are there, and hears at once that no other one will come."""
    destroys = AT_THE_END.replace('"by rank 0")', '"by rank 0"); dist.barrier(); dist.destroy_process_group()')
    asks = (
        destroys.replace("else:\n", "else:\n    dist.barrier()\n")
        + """
    since = time.monotonic()
    try: store.get("of nobody")
    except dist.DistStoreError as error: print(error, time.monotonic() - since < 5)
"""
    )
    done = run(tmp_path, "-n", "2", "-c", asks, OMP_NUM_THREADS="1")
    said = "by rank 0\nget: rank 0 has destroyed the process group of this store True\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


GOES_ON = """
import time, torch.distributed as dist
from torch.distributed import distributed_c10d
dist.init_process_group("mpi")
store = distributed_c10d._get_default_store()
dist.barrier()
if dist.get_rank() == 0:
    dist.destroy_process_group()
    time.sleep(4)
else:
    time.sleep(1)
    since = time.monotonic()
    try: store.get("of nobody")
    except dist.DistStoreError as error: print(error, time.monotonic() - since < 2)
"""


@pytest.mark.launch
def test_rank_0_answers_while_it_goes_on_without_the_group(tmp_path: Path) -> None:
    """Another rank waited for its whole limit, and heard that rank 0 had not answered."""
    done = run(tmp_path, "-n", "2", "-c", GOES_ON, OMP_NUM_THREADS="1")
    said = "get: rank 0 has destroyed the process group of this store True\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


AT_EXIT = """
import atexit, torch, mpicoll as dist
def last():
    torch.distributed.all_reduce(one := torch.ones(1), group=torch.distributed.new_group(backend="gloo"))
    print(f"{one.item():.0f}\\n", end="", flush=True)
atexit.register(last)  # before the world begins, so that it runs after the functions that mpicoll registers then
dist.init_process_group()
"""


@pytest.mark.launch
def test_functions_of_atexit_may_still_ask(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "-c", AT_EXIT, OMP_NUM_THREADS="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n2\n", "")


class Messages:
    """A communicator on which the questions of any number of ranks have come. Keeps what is sent."""

    def __init__(self, questions: Iterator[tuple[int, Question]]) -> None:
        self._come = deque((rank, pickle.dumps(tuple(question))) for rank, question in questions)
        self.sent: dict[int, Answer] = {}

    def Iprobe(self, source: int, tag: int, status: MPI.Status) -> bool:
        if self._come:
            rank, content = self._come[0]
            status.Set_source(rank)
            status.Set_elements(MPI.BYTE, len(content))
        return bool(self._come)

    def Recv(self, buffer: tuple[bytearray, int, Any], source: int, tag: int) -> None:
        rank, content = self._come.popleft()
        assert (rank, len(content)) == (source, buffer[1])
        buffer[0][:] = content

    def Isend(self, buffer: tuple[bytes, int, Any], rank: int, tag: int) -> MPI.Request:
        assert rank not in self.sent
        self.sent[rank] = Answer(*pickle.loads(buffer[0]))
        return MPI.REQUEST_NULL


def test_ten_thousand_ranks_cost_two_messages_for_each_call_and_nothing_else() -> None:
    """Each sets its key; then each waits for the keys of all, the last of which comes later."""
    ranks, keys = range(1, 10_000), store.Keys()

    def look(call: Any = None) -> dict[int, Answer]:
        """What rank 0 answers when each rank has called this; None: nobody has."""
        numbers = itertools.count(1)
        comm = Messages((rank, Question(KEYS, (0, *call(rank), 60.0), next(numbers))) for rank in (ranks if call else ()))
        keys.mpi = SimpleNamespace(comm=comm, lock=nullcontext())  # type: ignore[assignment]
        keys.look()
        return comm.sent

    wanted = [str(rank) for rank in range(1, 101)] + ["0"]
    assert len(look(lambda rank: ("set", (str(rank), b"1")))) == len(ranks)
    assert not look(lambda rank: ("multi_get", (wanted,)))
    assert not look()
    keys.store.set("0", "last")
    sent = look()
    assert len(sent) == len(ranks)
    assert {tuple(answer.value) for answer in sent.values()} == {(b"1",) * 100 + (b"last",)}
    assert not keys._open

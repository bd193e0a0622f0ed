"""The record of what a rank has called last: its content, and the ways in which it comes to be written."""

import json
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import mpicoll as dist
from mpicoll.__main__ import main
from mpicoll._base.facts import Facts
from mpicoll._faults import sigusr2
from mpicoll._faults.call_comparison import REMEMBERED
from mpicoll._launch.doctor import dump
from tests.faults.clock import FAST
from tests.support import agree, everyone, launch

SCRIPT = "tests/faults/scripts/records.py"


def dumped(folder: Path) -> Any:
    return json.loads(Path(dist.dump_flight_record(folder)).read_text())


def group_in(record: Any, name: str) -> Any:
    (found,) = [group for group in record["groups"] if group["name"] == name]
    return found


def test_what_a_record_holds(world: Any, shared_path: Path, rank: int, size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=77))
    began = time.time()
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX, group=group)
    work = dist.broadcast(torch.ones(3, dtype=torch.int16), 0, group=group, async_op=True)
    work.wait()
    blocks = [torch.ones(2, dtype=torch.int8) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.ones(2, dtype=torch.int8), blocks, 0, group=group)
    record = dumped(shared_path / "new")
    wrong = []
    if (record["rank"], record["world_size"], record["version"]) != (rank, size, 1):
        wrong.append("rank, world size or version")
    if not began - 1 < record["time"] < time.time() + 1:
        wrong.append(f"time {record['time']}")
    found = group_in(record, group.group_name)
    calls = [Facts.from_json(each) for each in found.pop("collectives")]
    expected = {"name": group.group_name, "ranks": list(range(size)), "timeout_s": 77.0, "error": None, "issued": 3}
    if found != expected:
        wrong.append(f"{found}")
    sends, receives = ({}, dict.fromkeys(range(1, size), 2)) if rank == 0 else ({0: 2}, {})
    if calls != [
        Facts("all_reduce", "MAX", "float32", 8),
        Facts("broadcast", dtype="int16", nbytes=6, root=0),
        Facts("gather", dtype="int8", root=0, sends=sends, receives=receives),
    ]:
        wrong.append(f"{[str(call) for call in calls]}")
    (main,) = [thread for thread in record["threads"] if thread["main"]]
    if not any("test_flight_recorder.py" in call and "in dumped" in call for call in main["stack"]) or "dumped" not in main["at"]:
        wrong.append(f"{main}")
    agree(not wrong, wrong)
    agree(sorted(path.name for path in (shared_path / "new").iterdir()) == sorted(f"rank-{each}.json" for each in range(size)))
    dist.destroy_process_group(group)


def test_which_collectives_have_ended(world: Any, shared_path: Path, rank: int, size: int) -> None:
    """Times are those of the clock; the last 2000 are kept."""
    group, tensor = dist.new_group(), torch.ones(1)
    for _ in range(REMEMBERED + 5):
        dist.all_reduce(tensor, group=group)
    if rank == 0 and size > 1:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        time.sleep(0.2)
        entries = group_in(dumped(shared_path), group.group_name)["collectives"]
        assert entries[-1]["started"] == pytest.approx(time.time(), abs=20)
        under_way = 1
    else:
        entries, under_way = group_in(dumped(shared_path), group.group_name)["collectives"], 0
    numbers = [entry["number"] for entry in entries]
    everyone(None)
    if size > 1:
        work.wait() if rank == 0 else dist.all_reduce(tensor, group=group)
    agree(numbers == list(range(6 + under_way, REMEMBERED + 6 + under_way)), numbers[:3])
    agree([entry["ended"] for entry in entries] == [True] * (REMEMBERED - under_way) + [False] * under_way)
    agree([entry["asynchronous"] for entry in entries].count(True) == under_way)
    dist.destroy_process_group(group)


@pytest.mark.min_ranks(2)
def test_messages_under_way(world: Any, shared_path: Path, rank: int, size: int) -> None:
    group, left, right = dist.new_group(), (rank - 1) % size, (rank + 1) % size
    blocked = threading.Thread(target=dist.recv, args=(torch.zeros(2), left, group, 1))
    blocked.start()
    pending = dist.irecv(torch.zeros(3, dtype=torch.int16), left, group, 2)
    while not (messages := [each for each in dumped(shared_path)["messages"] if each["group"] == group.group_name]):
        time.sleep(0.01)
    record = dumped(shared_path)
    everyone(None)
    dist.send(torch.ones(2), right, group, 1)
    dist.send(torch.ones(3, dtype=torch.int16), right, group, 2)
    blocked.join()
    pending.wait()
    agree(messages[0].pop("started") <= time.time())
    agree(messages == [{"group": group.group_name, "operation": "recv", "peer": left}], messages)
    expected = {"group": group.group_name, "operation": "irecv", "dtype": "int16", "nbytes": 6}
    agree(expected in record["pending_messages"], record["pending_messages"])
    dist.destroy_process_group(group)


@pytest.mark.min_ranks(2)
def test_a_group_that_has_failed_says_why(world: Any, shared_path: Path, rank: int) -> None:
    group = dist.new_group()
    if rank == 0:
        with pytest.raises(dist.OperationTimeout):
            dist.barrier(group=group, timeout=timedelta(seconds=0.3))
        assert "not every rank came" in group_in(dumped(shared_path), group.group_name)["error"]
    everyone(None)
    dist.destroy_process_group(group)


def test_a_record_without_a_group_is_refused(tmp_path: Path) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    with pytest.raises(dist.MpicollError, match="there is no process group"):
        dist.dump_flight_record(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_oserror(world: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        dist.dump_flight_record(tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    ("status", "free"),
    [
        ("SigBlk:\t0\nSigIgn:\t0\nSigCgt:\t0000000000000400\n", True),  # SIGUSR1
        ("SigBlk:\t0\nSigIgn:\t0\nSigCgt:\t0000000000000800\n", False),
        ("SigIgn:\t0000000000000800\n", False),
        ("Name:\tpython\n", True),  # a kernel that shows no signals
    ],
)
def test_whether_sigusr2_is_free(status: str, free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(Path, "read_text", lambda path: status)
        found = sigusr2.is_free(signal.SIGUSR2)
    assert found == free


# -- jobs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.launch
@pytest.mark.parametrize("way", ["signal", "handler-before", "handler-after", "asyncio", "fork"])
def test_sigusr2(way: str, tmp_path: Path) -> None:
    """A rank that is blocked inside MPI writes its record at once, and goes on. The program's own handler wins."""
    done = launch(2, str(Path(SCRIPT).resolve()), way, cwd=tmp_path)
    assert done.stdout.count(f"{way}: done") == 2, done.stderr
    assert done.returncode == 0
    files = sorted(path.name for path in tmp_path.rglob("*.json"))
    assert files == (["rank-0.json", "rank-1.json"] if way in ("signal", "asyncio") else [])
    if way == "signal":
        for rank in range(2):
            line = f"mpicoll: rank {rank} of 2: flight record, because of SIGUSR2: {tmp_path}"
            assert done.stderr.count(line) == 1, done.stderr
        record = json.loads((tmp_path / "mpicoll-dump/rank-0.json").read_text())
        last = record["groups"][0]["collectives"][-1]
        assert (last["operation"], last["nbytes"], last["ended"]) == ("all_reduce", 12, False)
        (main,) = [thread for thread in record["threads"] if thread["main"]]
        assert "in signalled" in main["at"]


@pytest.mark.launch
def test_all_ranks_write_their_records_when_the_watchdog_ends_the_job(tmp_path: Path) -> None:
    done = launch(2, str(Path(SCRIPT).resolve()), "expires", cwd=tmp_path, env={"MPICOLL_DUMP_DIR": "dumps", **FAST})
    assert done.returncode != 0
    folder = tmp_path / "dumps"
    said = f"flight records of 2 of 2 ranks: {folder}; `mpicoll doctor dump {folder}` compares them"
    assert done.stderr.count(said) == 2, done.stderr  # for the error that the program caught, and for the end
    records = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    last = [record["groups"][0]["collectives"][-1] for record in records]
    assert [(each["operation"], each["ended"]) for each in last] == [("all_reduce", False), ("broadcast", True)]
    assert "exceeded the group's timeout of 2 s" in records[0]["reason"]


@pytest.mark.launch
def test_a_rank_that_has_ended_its_program_still_writes_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump, "PATIENCE_S", 0.6)  # that of the job
    done = launch(2, SCRIPT, "leaves", env={"MPICOLL_DUMP_DIR": str(tmp_path), **FAST})
    assert done.returncode != 0
    assert "flight records of 2 of 2 ranks" in done.stderr
    assert main(["doctor", "dump", str(tmp_path)]) == 1
    report = capsys.readouterr().out
    assert "rank 0 waits in #3 all_reduce(SUM, float32, 2 elements)" in report
    assert "rank 1 has not come\n      rank 1: its last collective on this group is number 2, all_reduce" in report
    assert "its program is at its end, or outside Python" in report


@pytest.mark.launch
def test_without_a_folder_the_end_of_the_job_names_the_setting(tmp_path: Path) -> None:
    done = launch(2, str(Path(SCRIPT).resolve()), "expires", cwd=tmp_path, env=FAST)
    assert done.returncode != 0
    assert "set MPICOLL_DUMP_DIR=FOLDER" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.launch
def test_a_folder_that_cannot_be_used_is_reported_at_the_start_and_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = launch(
        2, str(Path(SCRIPT).resolve()), "expires-in-wait", cwd=tmp_path, env={"MPICOLL_DUMP_DIR": "file/folder", **FAST}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("expires-in-wait: done") == 2
    assert done.stderr.count("MPICOLL_DUMP_DIR cannot be used: ") == 2, done.stderr
    assert done.stderr.count("mpicoll: rank 0 of 2: cannot write its flight record: ") == 1, done.stderr


@pytest.mark.launch
@pytest.mark.parametrize("way", ["expires-in-wait", "requested"])
def test_all_ranks_write_their_records_while_the_job_goes_on(way: str, tmp_path: Path) -> None:
    done = launch(2, SCRIPT, way, env={"MPICOLL_DUMP_DIR": str(tmp_path), **FAST})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{way}: done") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json", "request"]
    assert done.stderr.count("flight records of 2 of 2 ranks") == (way == "expires-in-wait")

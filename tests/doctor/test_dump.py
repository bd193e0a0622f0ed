"""``mpicoll doctor dump``: each finding on made-up records, and real records of all collectives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mpicoll as dist
from mpicoll.__main__ import main
from mpicoll._base.facts import Facts
from mpicoll._launch.doctor import dump
from tests.faults.mismatches import OPERATIONS, Call
from tests.support import agree, everyone

NOW = 1_800_000_000.0
SUM = Facts("all_reduce", "SUM", "float32", 8)
BCAST = Facts("broadcast", dtype="float32", nbytes=8, root=0)


def group(calls: list[Facts], ended: int, name: str = "0", ranks: tuple[int, ...] = (0, 1), **more: Any) -> dict[str, Any]:
    """A group whose last collective began 30 s before the record; ``ended``: how many have ended."""
    numbered = [
        {"number": number, **call.as_json(), "asynchronous": False, "started": NOW - 30, "ended": number <= ended}
        for number, call in enumerate(calls, start=1)
    ]
    known = {"name": name, "ranks": list(ranks), "timeout_s": 60.0, "error": None, "issued": len(calls)}
    return {**known, "collectives": numbered, **more}


def write(folder: Path, *groups: list[dict[str, Any]], **more: Any) -> None:
    """Writes a record for each rank's list of groups."""
    folder.mkdir(exist_ok=True)
    for rank, own in enumerate(groups):
        main_thread = {"name": "MainThread", "main": True, "at": f"train.py:{rank + 1} in step", "stack": ["a b.py:4 in main"]}
        record = {
            "version": 1, "mpicoll": "0", "reason": "SIGUSR2", "rank": rank, "world_size": len(groups), "host": "h", "pid": 1,
            "time": NOW, "monotonic_offset": 0.0, "groups": own, "messages": [], "pending_messages": [],
            "threads": [{"name": "other", "main": False, "at": None, "stack": []}, main_thread], **more,
        }  # fmt: skip
        folder.joinpath(f"rank-{rank}.json").write_text(json.dumps(record))


def change(path: Path, **more: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def said(folder: Path, capsys: pytest.CaptureFixture[str], status: int) -> str:
    assert main(["doctor", "dump", str(folder)]) == status
    return capsys.readouterr().out


def test_ranks_that_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [group([SUM, BCAST], 2)], [group([SUM, BCAST], 2)])
    assert said(tmp_path, capsys, 0) == (
        "ok    records: ranks 0-1 on 1 host; written because of\n"
        "      SIGUSR2\n"
        "ok    group '0': alike on ranks 0-1, up to #2 broadcast(float32, 2 elements, root 0)\n"
        "the ranks agree\n"
    )


def test_ranks_of_a_healthy_job_need_not_be_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The root of a broadcast runs ahead, and a rank has just begun another collective."""
    ahead = group([SUM, BCAST, SUM], 2)
    ahead["collectives"][-1]["started"] = NOW - 0.5
    write(tmp_path, [ahead], [group([SUM], 1)])
    assert "alike on ranks 0-1, up to #3 all_reduce" in said(tmp_path, capsys, 0)


def test_a_rank_waits_if_the_timeout_of_its_group_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job with a timeout of 2 s had expired, and the doctor said that its ranks agree."""
    late = group([SUM, BCAST], 1, timeout_s=2.0)
    late["collectives"][-1]["started"] = NOW - 2.1
    message = {"group": "0", "operation": "recv", "peer": 0, "started": NOW - 2.2}
    write(tmp_path, [late], [group([SUM], 1, timeout_s=2.0)])
    change(tmp_path / "rank-1.json", messages=[message])
    text = said(tmp_path, capsys, 1)
    assert "rank 0 waits in #2 broadcast(float32, 2 elements, root 0) for 2 s; rank 1 has not come" in text
    assert "rank 1 waits in recv for rank 0 on group '0' for 2 s" in text


def test_the_first_call_that_differs_is_named_with_the_ranks_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [SUM, SUM, BCAST, SUM], [SUM, SUM._replace(reduction="MAX"), SUM, BCAST], [SUM, SUM, BCAST, SUM]
    write(tmp_path, *([group(own, 4, ranks=(0, 1, 2))] for own in calls))
    text = said(tmp_path, capsys, 1)
    assert (
        "FAIL  group '0': collective #2: the ranks' calls of all_reduce differ in the reduction\n"
        "      ranks 0, 2: all_reduce(SUM, float32, 2 elements)\n"
        "      rank 1: all_reduce(MAX, float32, 2 elements)\n"
        "      -> start the program with MPICOLL_CHECK=1" in text
    )
    assert "1 thing wrong" in text


def test_a_rank_that_has_not_come_is_named_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [group([SUM, BCAST], 1)], [group([SUM], 1)])
    assert (
        "FAIL  group '0': rank 0 waits in #2 broadcast(float32, 2 elements, root 0) for 30 s; rank 1 has not come\n"
        "      rank 1: its last collective on this group is number 1, all_reduce(SUM, float32, 2 elements), which has ended; "
        "its program is at train.py:2 in step\n"
        "      rank 0: it is in its collective 2 on this group, broadcast(float32, 2 elements, root 0), for 30 s; "
        "its program is at train.py:1 in step\n" in said(tmp_path, capsys, 1)
    )


def test_a_rank_whose_group_or_program_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [group([SUM], 0, ranks=(0, 1, 2))], [], [group([], 0, ranks=(0, 1, 2))])
    change(tmp_path / "rank-1.json", threads=[])
    text = said(tmp_path, capsys, 1)
    assert "rank 0 waits in #1 all_reduce(SUM, float32, 2 elements) for 30 s; ranks 1-2 have not come" in text
    assert "rank 1: it has no such group (destroyed, or never made); its program is at its end, or outside Python" in text
    assert "rank 2: it has begun no collective on this group; its program is at train.py:3 in step" in text


def test_a_collective_to_which_all_have_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [group([SUM], 0)], [group([SUM], 0)])
    expected = "ranks 0-1 wait in #1 all_reduce(SUM, float32, 2 elements) for 30 s; every rank has come: MPI, or the network"
    assert expected in said(tmp_path, capsys, 1)


def test_ranks_without_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *[[group([SUM], 0, ranks=(0, 1, 2, 3))]] * 4)
    for rank in (1, 3):
        (tmp_path / f"rank-{rank}.json").unlink()
    text = said(tmp_path, capsys, 1)
    assert "FAIL  records: none from ranks 1, 3 (of 4)\n      such a rank has ended, is stopped" in text
    assert "ranks 0, 2 wait in #1 all_reduce(SUM, float32, 2 elements) for 30 s; of ranks 1, 3 there is no record" in text


def test_groups_of_some_ranks_name_the_ranks_of_the_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"name": "dp", "ranks": (2, 1)}
    write(tmp_path, [], [group([SUM], 1, **own)], [group([BCAST], 1, **own)])  # type: ignore[arg-type]
    text = said(tmp_path, capsys, 1)
    assert "group 'dp' of ranks 1-2: collective #1: the ranks call different collectives" in text
    assert "rank 2: broadcast(" in text
    assert "rank 1: all_reduce(" in text


def test_a_group_that_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [group([SUM], 1, error="the group is unusable since ...")], [group([SUM], 1)])
    assert "FAIL  group '0': unusable on rank 0: the group is unusable since ..." in said(tmp_path, capsys, 1)


def test_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = {"group": "0", "operation": "recv", "peer": 1, "started": NOW - 40}
    any_rank = {"group": "0", "operation": "recv", "peer": None, "started": NOW - 50}
    young = {"group": "0", "operation": "send", "peer": 1, "started": NOW - 1}
    write(tmp_path, [group([], 0)], [group([], 0)])
    change(tmp_path / "rank-0.json", messages=[waiting, any_rank, young])
    pending = [{"group": "0", "operation": "irecv", "dtype": "int16", "nbytes": 6}]
    change(tmp_path / "rank-1.json", pending_messages=pending)
    text = said(tmp_path, capsys, 1)
    assert (
        "FAIL  messages: rank 0 waits in recv for rank 1 on group '0' for 40 s\n"
        "      the program of rank 0 is at train.py:1 in step\n"
        "      the program of rank 1 is at train.py:2 in step\n"
        "FAIL  messages: rank 0 waits in recv for any rank on group '0' for 50 s\n"
        "      the program of rank 0 is at train.py:1 in step\n"
        "note  messages: rank 1 has 1 under way that it does not wait for here\n"
        "      irecv of 6 bytes, int16, on group '0'\n"
        "2 things wrong" in text
    )
    assert "no collective yet" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ('{"version": 9}', "version 9 of the format"),
        ("{}", "KeyError: 'version'"),
    ],
)
def test_files_that_are_no_records(content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [group([SUM], 1)], [group([SUM], 1)])
    (tmp_path / "rank-1.json").write_text(content)
    text = said(tmp_path, capsys, 1)
    assert "FAIL  records: rank-1.json cannot be read: " in text
    assert words in text
    assert "none from rank 1 (of 2)" in text


def test_records_of_several_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [group([SUM], 1)], [group([SUM], 1)])
    change(tmp_path / "rank-1.json", time=NOW - 500)
    assert "note  records: rank 1 wrote 500 s before rank 0: of an earlier job?" in said(tmp_path, capsys, 0)
    change(tmp_path / "rank-1.json", world_size=5)
    text = said(tmp_path, capsys, 1)
    assert "FAIL  records: of jobs of 2 and 5 ranks\n      -> empty the folder before each job" in text
    change(tmp_path / "rank-1.json", world_size=2, rank=0)
    assert "rank-1.json cannot be read: ValueError: it is the record of rank 0" in said(tmp_path, capsys, 1)


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [group([SUM], 1)], [group([BCAST], 1)])
    assert main(["doctor", "dump", "--json", str(tmp_path)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["works"] is False
    assert report["facts"] == {"ranks": [0, 1], "missing": []}
    assert [finding["state"] for finding in report["findings"]] == ["ok", "fail"]


def test_a_rank_that_is_behind_with_queued_collectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [group([SUM, BCAST], 1)], [group([SUM], 0, issued=3)])
    call = "all_reduce(SUM, float32, 2 elements)"
    assert f"rank 1: it is in its collective 1 on this group, {call}, for 30 s, with 2 more queued; its" in said(
        tmp_path, capsys, 1
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["empty"], "empty holds no flight record"),
        ([], "required: folder"),
        (["a", "b"], "unrecognized arguments"),
    ],
)
def test_command_lines_that_are_wrong(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "dump", *words])
    assert ended.value.code == 2
    captured = capsys.readouterr().err
    assert "usage: mpicoll doctor dump" in captured
    assert error in captured


# -- real records ----------------------------------------------------------------------------------------------------------


def all_collectives(group: Any, rank: int, size: int) -> None:
    def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(count, dtype=dtype)

    for operation in OPERATIONS:  # one of each kind, and then what these have not
        Call(operation).make(dist, group, rank, size, async_op=False)
    dist.all_reduce(ones(3, torch.bfloat16), dist.ReduceOp.MAX, group=group)
    dist.reduce(ones(3, torch.complex64), 0, group=group)
    dist.broadcast(ones(4, torch.bool), 0, group=group)
    dist.all_reduce_coalesced([ones(3), ones(2)], group=group)
    dist.reduce_scatter(ones(rank + 1), [ones(each + 1) for each in range(size)], group=group)
    dist.all_gather([ones(each + 1) for each in range(size)], ones(rank + 1), group=group)
    dist.all_gather_coalesced([[ones(2), ones(1)] for _ in range(size)], [ones(2), ones(1)], group=group)
    dist.all_to_all([ones(each + 1) for each in range(size)], [ones(rank + 1) for _ in range(size)], group=group)
    dist.all_gather_object([None] * size, {"rank": rank}, group=group)
    dist.monitored_barrier(group)


@pytest.mark.min_ranks(2)
def test_all_collectives_agree(world: Any, shared_path: Path, rank: int, size: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group()
    last = size - 1
    some = dist.new_group([0, last])
    all_collectives(dist.group.WORLD, rank, size)
    if rank in (0, last):
        all_collectives(some, 0 if rank == 0 else 1, 2)
    dist.dump_flight_record(shared_path / "records")
    everyone(None)
    wrong = ""
    if rank == 0:
        records, unreadable = dump.read(shared_path / "records")
        report = dump.examine(records, unreadable)
        calls = [call for group in records[0].groups.values() for call in group.calls]
        if not report.works or len(calls) < 2 * 18:
            wrong = f"{len(calls)} collectives: {report.as_text()}"
    agree(not wrong, wrong)

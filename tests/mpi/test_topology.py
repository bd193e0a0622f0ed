"""What follows for all ranks from the facts of each: pure functions, for any number of ranks and cores."""

import pytest

from mpicoll._mpi.topology import Facts, topology_of


def facts(cpus: range, threads: int, node: str = "a", per_core: int = 1, quota: int | None = None) -> Facts:
    return Facts(node, sum(1 << cpu for cpu in cpus), len(cpus) // per_core, quota, threads)


ALL, FIRST, SECOND = range(16), range(8), range(8, 16)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param([facts(ALL, 8)] * 2, 8, id="2 x 8"),
        pytest.param([facts(ALL, 1)] * 16, 1, id="16 x 1"),
        pytest.param([facts(ALL, 2)] * 8, 2, id="8 x 2"),
        pytest.param([facts(FIRST, 8), facts(SECOND, 8)], 8, id="a rank on each socket"),
        pytest.param([facts(ALL, 0)] * 4, 4, id="torch's default, of which each rank takes its share"),
        pytest.param([facts(ALL, 0)] * 32, 1, id="more ranks than cores"),
        pytest.param([facts(ALL, 8), facts(ALL, 4)], 4, id="the fewest threads"),
        pytest.param([facts(ALL, 8), facts(ALL, 9)], 1, id="a thread too many"),
        pytest.param([facts(range(1), 8), facts(range(1, 2), 8)], 1, id="8 threads bound to one core"),
        pytest.param([facts(ALL, 8, per_core=2)] * 2, 1, id="hardware threads are no cores"),
        pytest.param([facts(ALL, 4, per_core=2)] * 2, 4, id="a thread for each core"),
        pytest.param([facts(ALL, 4, quota=4)] * 2, 1, id="a container's quota"),
        pytest.param([facts(ALL, 8)] * 2 + [facts(ALL, 8, "b")] * 2, 8, id="two nodes"),
        pytest.param([facts(ALL, 8)] * 2 + [facts(FIRST, 8, "b")] * 2, 1, id="one of two nodes is too small"),
        pytest.param([facts(range(64), 64, str(node)) for node in range(1024)], 64, id="1,024 nodes"),
    ],
)
def test_threads_of_every_rank(ranks: list[Facts], expected: int) -> None:
    """As many as every rank has, if every node has cores for all threads of its ranks; otherwise 1."""
    found = {topology_of(ranks, own).threads for own in {0, len(ranks) - 1}}
    assert found == {expected}
    assert topology_of(ranks, 0).of([0]).threads == expected


def test_a_rank_without_a_core_makes_all_crowded() -> None:
    assert not topology_of([facts(FIRST, 1)] * 8, 0).crowded
    assert topology_of([facts(FIRST, 1)] * 8 + [facts(FIRST, 1, "b")] * 9, 0).crowded
    assert topology_of([facts(FIRST, 1, quota=2)] * 3, 0).crowded


def test_the_share_of_a_rank() -> None:
    found = [topology_of([facts(ALL, 0), facts(FIRST, 0), facts(SECOND, 0)], own).share for own in range(3)]
    assert found == [16 // 3, 8 // 2, 8 // 2]
    assert topology_of([facts(ALL, 0, quota=4)] * 2, 0).share == 2

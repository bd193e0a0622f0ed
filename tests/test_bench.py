"""The benchmark script runs, checks its results first and prints what it says it prints; figures are not tested."""

import pytest

from tests.support import launch


@pytest.mark.launch
def test_call_cost_prints_a_row_for_each_size():
    result = launch(2, "-m", "mpicoll.bench", "--bytes", "8", "4096", "--repeat", "2")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("all_reduce, float32, 2 ranks")
    assert [line.split()[0] for line in lines if "[" in line and line.split()[0].isdigit()] == ["8", "4096"]


@pytest.mark.launch
def test_a_size_that_is_no_float32_tensor_is_refused():
    result = launch(1, "-m", "mpicoll.bench", "--bytes", "7")
    assert result.returncode == 2
    assert "multiples of 4" in result.stderr


@pytest.mark.launch
def test_rpc_prints_a_row_for_each_way():
    result = launch(2, "-m", "mpicoll.bench", "rpc", "--bytes", "4096", "1048576", "--repeat", "1", "--width", "4")
    assert result.returncode == 0, result.stderr
    lines = [line.split("  ")[0].strip() or line.strip().split("  ")[0] for line in result.stdout.splitlines() if "[" in line][1:]
    assert lines == ["empty call", "4096 bytes", "1048576 bytes", "64 in flight", "ResNet step, 4"], result.stdout

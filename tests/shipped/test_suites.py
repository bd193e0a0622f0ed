"""Each test of torch's suites, as one test of this session; each is a world from init to destroy."""

import fnmatch
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed

from mpicoll import rpc
from mpicoll.autograd import contexts
from tests.shipped.left_out import LEFT_OUT
from tests.shipped.suites import SUITES, Suite, load
from tests.support import everyone, session

LIMIT_S = 60  # of each operation; torch's own in DistributedTest


def names(suite: Suite) -> list[str]:
    """The tests of ``suite`` that are not left out."""
    found = [name for name in dir(load(suite)) if name.startswith("test_")]
    for reason, patterns in LEFT_OUT.get(suite.short, ()):
        for pattern in patterns:
            matching = fnmatch.filter(found, pattern)
            assert matching, f"{suite.short} of torch {torch.__version__} has no {pattern}, left out because: {reason}"
            found = [name for name in found if name not in matching]
    return found


CASES = [
    pytest.param(suite, name, id=f"{suite.short}-{name}")
    for suite in SUITES
    if session().side.size in suite.ranks or not suite.fixed
    for name in names(suite)
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("suite", "name"), CASES)
def test_of_torch(suite: Suite, name: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = load(suite)(name)
    if reason := getattr(getattr(test, name), "__unittest_skip_why__", ""):
        pytest.skip(reason)
    test.file_name = str(shared_path / "store")
    for folder in ("barrier", "test_dir", "init_dir"):
        (shared_path / folder).mkdir(exist_ok=True)
    monkeypatch.setenv("TEMP_DIR", str(shared_path))
    everyone(None)
    with test.fresh_module():
        run(test, name)


def run(test: Any, name: str) -> None:
    """Runs one test in this rank, and ends what it has left open after a failure, so that the others do not wait."""
    try:
        if test.needs_world:
            dist.init_process_group("mpi", init_method=test.init_method, timeout=timedelta(seconds=LIMIT_S))
        getattr(test, name)()
    except SystemExit as leaving:
        skips = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
        if leaving.code not in skips:
            pytest.fail(f"{name} left with status {leaving.code}")
        pytest.skip(skips[leaving.code])
    finally:
        contexts.enter(None)
        if rpc.api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        if dist.is_initialized():
            dist.destroy_process_group()

"""DeepSpeed's ZeRO on CPUs, over MPI as over Gloo.

DeepSpeed compiles an extension at its first start, and its processes wait for each other by a file: if the first one is
killed, all later ones wait for ever. Therefore it is built here beforehand, in a folder of the session, by one process; or
in TORCH_EXTENSIONS_DIR, where that is set.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import run
from tests.support.jobs import OVER_MPI, same_training, trained

SCRIPT = str(Path(__file__).parent / "scripts" / "deepspeed_zero.py")
BUILD = "from deepspeed.accelerator import get_accelerator as a; a().create_op_builder('ShareMemCommBuilder').load()"
BUILD_S = 250  # seconds; 70 s of CPU time
HUNG_S = 100  # seconds; a job takes 10 to 20 on two free cores

pytestmark = [pytest.mark.companion, pytest.mark.launch, pytest.mark.timeout(BUILD_S + 2 * HUNG_S + 20)]


@pytest.fixture(scope="module", autouse=True)
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "TORCH_EXTENSIONS_DIR" not in os.environ:
            patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        built = run([sys.executable, "-c", BUILD], timeout_s=BUILD_S)
        assert built.returncode == 0, built.stdout + built.stderr
        yield


@pytest.mark.parametrize("by", OVER_MPI)
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_zero(stage: str, by: str) -> None:
    expected = trained("torchrun", SCRIPT, "gloo", stage, timeout_s=HUNG_S)
    assert expected[0]["stage"] == int(stage)
    same_training(trained(by, SCRIPT, "mpi", stage, timeout_s=HUNG_S), expected, "mpi")

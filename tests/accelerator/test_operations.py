"""Tensors of an accelerator that mpicoll has no way of its own for: a device made of torch's PrivateUse1, see device.cpp."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import clean_environment

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.launch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(None in (shutil.which("g++"), shutil.which("ninja")), reason="the device is compiled"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device")
    build = (
        "import sys; from torch.utils import cpp_extension as made; made.load('own_device', [sys.argv[1]], "
        "build_directory=sys.argv[2], is_python_module=False, extra_cflags=['-O0'])"
    )
    words = [sys.executable, "-c", build, str(HERE / "device.cpp"), str(folder)]
    subprocess.run(words, env=clean_environment(), check=True, timeout=280)
    return folder / "own_device.so"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("api", ["mpicoll", "torch"])
def test_every_operation_goes_through_host_memory(library: Path, api: str, ranks: int) -> None:
    script = [str(HERE / "scripts/operations.py"), str(library), api]
    words = [sys.executable, "-m", "mpicoll.run", "--quiet", "-n", str(ranks), *script]
    done = subprocess.run(words, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "every operation is right\n"), done.stderr

"""The page in torch's debug server; what it shows is tested in tests/companions/test_debug_server.py."""

import sys

import pytest

from tests.support import LAUNCH_ENVIRONMENT, run

pytestmark = [pytest.mark.launch, pytest.mark.timeout(60)]

PROGRAM = """
import gc, sys
from torch.distributed.debug import _handlers
from mpicoll._c10d import debug_page

debug_page.serve()
for module in (_handlers, debug_page):  # as at the end of a program, with luck
    del sys.modules[module.__name__]
    vars(module).clear()
gc.collect()
"""


def test_handlers_outlive_python() -> None:
    """C++ drops its handlers after the end of Python: freeing one there ended the process by SIGABRT."""
    pytest.importorskip("torch.distributed.debug", reason="torch >= 2.13")
    done = run([sys.executable, "-c", PROGRAM], timeout_s=40, env=LAUNCH_ENVIRONMENT)
    assert done.returncode == 0, done.stderr

"""Times and numbers that hold where a program gives none, by torch's names."""

from __future__ import annotations

DEFAULT_RPC_TIMEOUT_SEC = 60.0  # until a call fails
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_INIT_METHOD = "env://"
DEFAULT_SHUTDOWN_TIMEOUT = 0  # no limit
UNSET_RPC_TIMEOUT = -1.0  # the agent's

"""What libraries ask of this worker's agent, as of torch's RpcAgent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpicoll.rpc.options import MPIRpcBackendOptions
from mpicoll.rpc.workers import WorkerInfo

if TYPE_CHECKING:
    from mpicoll.rpc.agent import Agent  # it loads MPI, which starts it


class CurrentAgent:
    """The read-only part of torch's RpcAgent, which libraries ask."""

    is_static_group = True  # all workers take part from init_rpc to shutdown

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Returns the worker of this name or rank; None: this one. Raises RuntimeError if there is none."""
        return self._agent.me if worker is None else self._agent.workers.find(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        return list(self._agent.workers.all)

    def get_metrics(self) -> dict[str, str]:
        """Returns the numbers of pending and running calls, and of threads."""
        agent = self._agent
        return {
            "agent.client_active_calls": str(agent.counts()[2]),
            "agent.server_active_calls": str(agent.handler.running),
            "agent.thread_pool_size": str(agent.pool.threads),
            "agent.num_idle_threads": str(agent.pool.idle()),
        }

    get_debug_info = get_metrics

    def _get_device_map(self, worker: WorkerInfo) -> dict[torch.device, torch.device]:
        return self._agent.options.device_maps.get(worker.name, {})

    def _get_backend_options(self) -> MPIRpcBackendOptions:
        return self._agent.options

"""A module that lives on another worker and is called here: torch.distributed.nn.RemoteModule over mpicoll.rpc.

A RemoteModule is little more than an RRef: ``forward`` is a call of the module's own ``forward`` on its worker, which autograd
follows inside mpicoll.autograd.context(). Whatever torch's RemoteModule refuses is refused here in its words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.remote_device import _remote_device
from torch.futures import Future

from mpicoll import rpc
from mpicoll.rpc import RRef, api, wire

__all__ = ["RemoteModule"]

NOT_SUPPORTED = (
    "register_buffer", "register_parameter", "add_module", "apply", "cuda", "ipu", "xpu", "cpu", "type", "float", "double",
    "half", "bfloat16", "to", "register_backward_hook", "register_forward_pre_hook", "register_forward_hook", "state_dict",
    "load_state_dict", "named_parameters", "buffers", "named_buffers", "children", "named_children", "modules", "named_modules",
    "requires_grad_", "zero_grad", "share_memory", "extra_repr",
)  # fmt: skip


class RemoteModule(nn.Module):
    """A module made on a worker, and called like one that is here (not collective).

    It is torch.distributed.nn.RemoteModule over mpicoll.rpc, without TorchScript.

    Args:
        remote_device: ``"worker1/cpu"``, ``"worker1"``, ``"rank:1/cuda:0"``: the worker and its device. Tensors of the CPU are
            moved to a CUDA device there; answers come back by the device map, or by the CPU where there is none.
        module_cls: Called there with ``args`` and ``kwargs``; must return an nn.Module.
        args: Positional arguments of ``module_cls``.
        kwargs: Keyword arguments of ``module_cls``.

    Raises:
        AssertionError: RPC is not initialised.
        ValueError: ``remote_device`` is none. What is wrong with ``module_cls`` is raised by the first call.

    Example:
        >>> linear = dist.nn.RemoteModule("worker1/cpu", torch.nn.Linear, args=(20, 30))
        >>> linear(torch.randn(128, 20)).shape
        torch.Size([128, 30])
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        self._place(remote_device, _module_interface_cls)
        self.module_rref: RRef[nn.Module] = rpc.remote(self.on, _make, (module_cls, tuple(args or ()), kwargs or {}, self.device))

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Returns another RemoteModule for a module that a worker has already.

        Args:
            remote_device: As for the class.
            module_rref: The RRef to the module.

        Raises:
            AssertionError, ValueError: As for the class.
        """
        module = RemoteModule.__new__(RemoteModule)
        module._place(remote_device, _module_interface_cls)
        module.module_rref = module_rref
        return module

    def _place(self, remote_device: str, interface: Any) -> None:
        if interface is not None:
            raise ValueError(
                "RemoteModule takes no TorchScript interface, torch has retired them: leave out _module_interface_cls"
            )
        super().__init__()
        if not api._is_current_rpc_agent_set():
            raise AssertionError("RemoteModule only works in RPC.")
        place = _remote_device(remote_device)
        self.on: str | int = place.worker_name() if place.worker_name() is not None else place.rank()  # type: ignore[assignment]
        self.device = str(place.device())
        agent = api._get_current_rpc_agent()
        self.is_device_map_set = bool(agent.options.device_maps.get(agent.get_worker_info(self.on).name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the answer of the module's ``forward``; waits for it.

        Args:
            args: Positional arguments of ``forward``.
            kwargs: Keyword arguments of ``forward``.
        """
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts a call of the module's ``forward`` and returns a future of the answer at once.

        Args:
            args: Positional arguments of ``forward``.
            kwargs: Keyword arguments of ``forward``.
        """
        everything = (self.module_rref, self.device, self.is_device_map_set, args, kwargs)
        return rpc.rpc_async(self.module_rref.owner(), _forward, everything)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Returns RRefs to the module's parameters, for mpicoll.optim.DistributedOptimizer.

        Args:
            recurse: Include those of submodules.
        """
        return rpc.rpc_sync(self.on, _parameters, (self.module_rref, recurse))  # type: ignore[no-any-return]

    def get_module_rref(self) -> RRef[nn.Module]:
        """Returns the RRef to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Sets the mode of the module on its worker; returns this RemoteModule.

        Args:
            mode: True: training; False: evaluation.
        """
        rpc.rpc_sync(self.on, _set_mode, (self.module_rref, mode))
        self.training = mode
        return self

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Not supported: see ``remote_parameters``.

        Args:
            recurse: Has no effect.

        Raises:
            ValueError: Always.
        """
        raise ValueError("Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead.")

    def __repr__(self) -> str:
        return f"RemoteModule(on={self.on!r}, device={self.device!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if wire.pickling_state() is None:
            raise RuntimeError("Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC")
        worker = self.on if isinstance(self.on, str) else f"rank:{self.on}"
        return RemoteModule.init_from_module_rref, (f"{worker}/{self.device}", self.module_rref)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule")

    refuse.__name__ = name
    return refuse


for _name in NOT_SUPPORTED:
    setattr(RemoteModule, _name, _refusal(_name))


# -- on the module's worker --------------------------------------------------------------------------------------------


def _make(module_cls: Callable[..., nn.Module], args: Any, kwargs: Any, device: str) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    return module.to(device)


def _forward(module_rref: RRef[nn.Module], device: str, has_device_map: bool, args: Any, kwargs: Any) -> Any:
    module = module_rref.local_value()
    if torch.device(device).type != "cuda":
        return module.forward(*args, **kwargs)
    answer = module.forward(
        *(_moved(value, device) for value in args), **{name: _moved(value, device) for name, value in kwargs.items()}
    )
    if has_device_map:
        return answer
    return tuple(_moved(value, "cpu") for value in answer) if isinstance(answer, (list, tuple)) else _moved(answer, "cpu")


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _parameters(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _set_mode(module_rref: RRef[nn.Module], mode: bool) -> None:
    module_rref.local_value().train(mode)

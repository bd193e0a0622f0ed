"""What torch.jit has compiled, which pickle does not know: functions travel by name, modules as torch.jit.save writes them."""

from __future__ import annotations

import importlib
import io
import pickle
from typing import Any

import torch


def reduced(obj: Any) -> Any:
    """For a pickler's reducer_override: how to make it again; None: it is neither."""
    if isinstance(obj, torch.jit.ScriptFunction):
        module, _, name = obj.qualified_name.removeprefix("__torch__.").rpartition(".")
        module = module or "__main__"  # torch leaves that out
        try:
            found = _function(module, name)
        except (ImportError, AttributeError):
            found = None
        if found is not obj:
            raise pickle.PicklingError(
                f"{obj.qualified_name}: a compiled function travels by name, but {module}.{name} is not it"
            )
        return _function, (module, name)
    if isinstance(obj, torch.jit.ScriptModule):
        file = io.BytesIO()
        torch.jit.save(obj, file)
        return _module, (file.getvalue(),)
    return None


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _module(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))

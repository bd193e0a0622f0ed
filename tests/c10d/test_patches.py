"""The table of patches, compared with what torch holds once a group of ours has been made."""

import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
import torch

from mpicoll._c10d import patches
from tests.support import ROOT

PACKAGE = str(ROOT / "mpicoll")


def functions_in_torch() -> Iterator[tuple[str, Any]]:
    """The functions that modules and classes of torch hold, by name."""
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] != "torch":
            continue
        for attribute, value in list(vars(module).items()):
            if type(value) is FunctionType:  # isinstance would call __getattribute__ of lazy objects
                yield f"{name}.{attribute}", value
            elif issubclass(type(value), type) and value.__module__.split(".")[0] == "torch":
                for inner, method in list(vars(value).items()):
                    if isinstance(method, FunctionType):
                        yield f"{name}.{attribute}.{inner}", method


def of_mpicoll(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(PACKAGE)


@pytest.mark.usefixtures("world")
def test_every_function_of_ours_in_torch_is_in_the_table() -> None:
    places = [patches.resolve(patch.target) for patch in patches.TABLE]
    known = {id(getattr(owner, name, None)) for owner, name in places}
    found = [name for name, function in functions_in_torch() if of_mpicoll(function)]
    assert "torch.distributed.distributed_c10d.init_process_group" in found
    assert not [name for name, function in functions_in_torch() if of_mpicoll(function) and id(function) not in known]


@pytest.mark.parametrize("patch", patches.TABLE, ids=lambda patch: f"{patch.target}-{patch.home}")
def test_an_entry_names_a_file_and_an_attribute(patch: patches.Patch) -> None:
    owner, name = patches.resolve(patch.target)
    assert (ROOT / "mpicoll" / patch.home).is_file()
    assert hasattr(owner, name) or "2.14" in patch.when, patch.target


def test_a_patch_outside_the_table_is_refused() -> None:
    with pytest.raises(KeyError):
        patches.wrap("torch.add", lambda function: function)
    with pytest.raises(KeyError):
        patches.assign("torch.pi", 3)
    with pytest.raises(KeyError), patches.replaced("torch.pi", 3):
        pass
    assert torch.pi > 3.14

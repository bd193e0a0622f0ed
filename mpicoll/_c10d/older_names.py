"""The names that functions had before torch 2.13. torch calls the backend by the newer name, or by a third one."""

from __future__ import annotations

OLDER_NAMES = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}


def name_as_called(error: BaseException, older_name: str) -> None:
    """Puts the name by which the program has called a function into the words of mpicoll's error."""
    newer_name = OLDER_NAMES[older_name]
    error.args = tuple(word.replace(newer_name, older_name) if isinstance(word, str) else word for word in error.args)

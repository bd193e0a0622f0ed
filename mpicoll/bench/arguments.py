"""Types of the command lines' arguments."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError

import torch

from mpicoll.bench import formulas


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: 1 or more")
    return int(text)


def size(text: str) -> int:
    """In bytes."""
    try:
        found = formulas.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    if found < 1:
        raise ArgumentTypeError(f"{text!r}: a size is 1 byte or more")
    return found


def number(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 <= found < math.inf:
        raise ArgumentTypeError(f"{text!r}: a finite number, 0 or more")
    return found


def positive(text: str) -> float:
    found = number(text)
    if found <= 0:
        raise ArgumentTypeError(f"{text!r}: more than 0")
    return found


def dtype(text: str) -> str:
    if not isinstance(getattr(torch, text, None), torch.dtype):
        raise ArgumentTypeError(f"{text!r} is no dtype of torch's: write float32, bfloat16, int64")
    return str(getattr(torch, text)).removeprefix("torch.")

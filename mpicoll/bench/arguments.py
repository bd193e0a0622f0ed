"""Types of command line arguments, for argparse."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError

import torch

from mpicoll.bench import formulas

MEASURE = "measure"


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: 1 or more")
    return int(text)


def size(text: str) -> int:
    """In bytes."""
    try:
        nbytes = formulas.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    if nbytes < 1:
        raise ArgumentTypeError(f"{text!r}: a size is 1 byte or more")
    return nbytes


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r}: a finite number, 0 or more")
    return value


def positive(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise ArgumentTypeError(f"{text!r}: more than 0")
    return value


def bandwidth(text: str) -> float | str:
    """GB/s, or MEASURE."""
    return MEASURE if text == MEASURE else positive(text)


def dtype(text: str) -> str:
    if not isinstance(getattr(torch, text, None), torch.dtype):
        raise ArgumentTypeError(f"{text!r} is no dtype of torch: write float32, bfloat16, int64")
    return str(getattr(torch, text)).removeprefix("torch.")

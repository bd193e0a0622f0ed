"""Sparse tensors as the strided ones that they consist of, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROW_WISE = (torch.sparse_csr, torch.sparse_bsr)
COLUMN_WISE = (torch.sparse_csc, torch.sparse_bsc)
LAYOUTS = (torch.sparse_coo, *ROW_WISE, *COLUMN_WISE)


class Form(NamedTuple):
    """How strided tensors make a sparse one. ``coalesced``: for COO."""

    layout: torch.layout
    shape: tuple[int, ...]
    coalesced: bool
    requires_grad: bool


def form_of(tensor: Tensor) -> Form | None:
    """None: it is strided."""
    if tensor.layout not in LAYOUTS:
        return None
    coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    return Form(tensor.layout, tuple(tensor.shape), coalesced, tensor.requires_grad)


def parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that it consists of, their memory as it is; itself if it is strided."""
    plain = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [plain._indices(), plain._values()]
    if tensor.layout in ROW_WISE:
        return [plain.crow_indices(), plain.col_indices(), plain.values()]
    if tensor.layout in COLUMN_WISE:
        return [plain.ccol_indices(), plain.row_indices(), plain.values()]
    return [tensor]


def joined(forms: list[Form | None], strided: list[Tensor]) -> list[Tensor]:
    """The tensors of these forms, which use up the strided ones in turn."""
    left = iter(strided)
    return [next(left) if form is None else _made(form, left) for form in forms]


def _made(form: Form, left: Iterator[Tensor]) -> Tensor:
    options: dict[str, Any] = {"requires_grad": form.requires_grad, "check_invariants": False}  # they were checked there
    if form.layout is torch.sparse_coo:
        indices, values = next(left), next(left)
        return torch.sparse_coo_tensor(indices, values, form.shape, is_coalesced=form.coalesced, **options)
    compressed, plain, values = next(left), next(left), next(left)
    return torch.sparse_compressed_tensor(compressed, plain, values, form.shape, layout=form.layout, **options)

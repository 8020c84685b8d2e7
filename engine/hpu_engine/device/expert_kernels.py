"""Two forms of the same sum over experts: sorted for a processor that branches, static for a graph that must not.

Both take `hidden` [rows, hidden], `ids` [rows, top_k] (index of an expert here, -1 for one that is elsewhere or none)
and `weights` [rows, top_k], and give float32 [rows, hidden]: sum over the chosen experts here of weight * expert(row),
in ascending order of expert, so that a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import ExpertKernel, Linear

Expert = tuple[Linear, Linear]
"""`gate_up` [rows, hidden] to [rows, 2 * width], gate first; `down` [rows, width] to [rows, hidden]."""


def sorted_kernel(experts: Sequence[Expert]) -> ExpertKernel:
    """Rows sorted by expert, one product per expert that was hit: work grows with tokens, not with experts."""

    def run(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows, top_k = ids.shape
        total = torch.zeros(rows, hidden.shape[1], dtype=torch.float32)
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat + 1, minlength=len(experts) + 1).tolist()
        row_of = torch.div(order, top_k, rounding_mode="floor")
        weight_of = weights.flatten()[order].float().unsqueeze(1)
        start = counts[0]
        for expert, count in zip(experts, counts[1:], strict=True):
            if count:
                here = slice(start, start + count)
                result = _apply(expert, hidden.index_select(0, row_of[here]))
                total.index_add_(0, row_of[here], result.float().mul_(weight_of[here]))
                start += count
        return total

    return run


def static_kernel(experts: Sequence[Expert]) -> ExpertKernel:
    """Every expert on every row, its weight 0 where it was not chosen: the same operations whatever the routing."""

    def run(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros(hidden.shape, dtype=torch.float32)
        for index, expert in enumerate(experts):
            weight = torch.where(ids == index, weights.float(), 0.0).sum(-1, keepdim=True)
            total = total + _apply(expert, hidden).float() * weight
        return total

    return run


def _apply(expert: Expert, x: Tensor) -> Tensor:
    gate_up, down = expert
    gate, up = gate_up(x).chunk(2, dim=-1)
    return down(F.silu(gate).mul_(up))

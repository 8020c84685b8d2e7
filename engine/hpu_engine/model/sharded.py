"""Tensor parallelism applied from outside: the model computes with its cut of the weights, these put results together.

Output rows cut (q, k, v, gate, up): nothing to do, a rank has the columns that its next matrix wants. Input columns cut
(o, down): partial sums, added up over ranks. Vocabulary cut: a rank embeds its own tokens, and logits are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import Linear
from hpu_engine.group.collectives import Collectives


def reduced(linear: Linear, collectives: Collectives) -> Linear:
    """`linear` over a cut of its input, its partial sums added up. Its bias must be on one rank only."""
    if collectives.size == 1:
        return linear
    return lambda x: collectives.all_reduce(linear(x))


def gathered(linear: Linear, collectives: Collectives) -> Linear:
    """`linear` over a cut of its output, the pieces of all ranks side by side."""
    if collectives.size == 1:
        return linear

    def apply(x: Tensor) -> Tensor:
        pieces = collectives.all_gather(linear(x)).chunk(collectives.size)
        return torch.cat(pieces, dim=-1)

    return apply


@dataclass(frozen=True, slots=True)
class Embedding:
    """`table` [rows, hidden] holds the tokens from `first` on; it may be of a narrower type than `dtype`."""

    table: Tensor
    dtype: torch.dtype
    first: int
    collectives: Collectives

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] to [tokens, hidden]."""
        if self.collectives.size == 1:
            return F.embedding(token_ids, self.table).to(self.dtype)
        local = token_ids - self.first
        elsewhere = (local < 0) | (local >= self.table.shape[0])
        found = F.embedding(local.masked_fill(elsewhere, 0), self.table).to(self.dtype)
        return self.collectives.all_reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0))

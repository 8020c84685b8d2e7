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


@dataclass(frozen=True, slots=True)
class Reduced:
    """`linear` over a cut of its input, its partial sums added up. Its bias must be on one rank only."""

    linear: Linear
    collectives: Collectives

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.collectives.all_reduce(self.linear(x))


@dataclass(frozen=True, slots=True)
class Gathered:
    """`linear` over a cut of its output, the pieces of all ranks side by side."""

    linear: Linear
    collectives: Collectives

    def __call__(self, x: Tensor, /) -> Tensor:
        return torch.cat(self.collectives.all_gather(self.linear(x)).chunk(self.collectives.size), dim=-1)


def reduced(linear: Linear, collectives: Collectives) -> Linear:
    return linear if collectives.size == 1 else Reduced(linear, collectives)


def gathered(linear: Linear, collectives: Collectives) -> Linear:
    return linear if collectives.size == 1 else Gathered(linear, collectives)


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

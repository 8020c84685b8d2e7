"""The combiner: the one place where the partial sums of ranks become a result. Nothing else of the layer reduces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hpu_engine.group.collectives import Collectives


class Combiner(Protocol):
    """`reduces` is False where the results are partial sums that the caller adds up over ranks later."""

    @property
    def reduces(self) -> bool: ...

    def __call__(self, partial: Tensor) -> Tensor:
        """[rows, hidden] of this rank's experts for all dispatched rows, to [tokens, hidden] of this rank's tokens."""


class SingleRank:
    """This rank's sum is the sum."""

    reduces = True

    def __call__(self, partial: Tensor) -> Tensor:
        return partial


class LeavePartial:
    """The caller adds up over ranks, together with something else."""

    reduces = False

    def __call__(self, partial: Tensor) -> Tensor:
        return partial


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Every rank has the same tokens and gets the same result."""

    collectives: Collectives
    reduces = True

    def __call__(self, partial: Tensor) -> Tensor:
        return self.collectives.all_reduce(partial)


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Rows of all `data` ranks were gathered; each gets the sum of its own over those ranks, then over the `tensor`
    ranks that share its rows.
    """

    data: Collectives
    tensor: Collectives
    reduces = True

    def __call__(self, partial: Tensor) -> Tensor:
        return self.tensor.all_reduce(self.data.reduce_scatter(partial))

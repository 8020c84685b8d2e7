"""The collectives that the model needs, as one small interface. Every rank of a group makes the same calls in order.

Ranks of a group are numbered 0 to size - 1; results that depend on an order use that one. Reductions add in rank order,
so that every rank has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """One rank's side of a group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, same shape and type."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[rows, ...] of every rank below each other, [size * rows, ...]. Any type, float8 included."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size * rows, ...] to this rank's [rows, ...] of the sum over ranks."""


class Alone:
    """A group of one: everything is already here."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Groups:
    """Whom a worker computes with: `tensor` shares its tokens, `data` has its cut of the weights and other tokens."""

    tensor: Collectives
    data: Collectives


ALONE = Groups(Alone(), Alone())

"""The dispatcher: brings every token to every rank that may hold one of its experts. It never reduces.

Ranks that share their tokens (tensor parallelism) need none. Ranks with tokens of their own (data parallelism) gather
the routing, chosen already, and the hidden states, prepared already: top-k and quantisation run on a rank's own rows,
not on those of all, and what travels is as small as it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hpu_engine.group.collectives import Collectives
from hpu_engine.model.moe.routing import Routing

Prepare = Callable[[Tensor], Tensor]
"""What the experts do to hidden states first (quantise them, or nothing), row by row."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """`hidden` [rows, hidden], prepared; `routing` of the same rows."""

    hidden: Tensor
    routing: Routing

    def __post_init__(self) -> None:
        assert self.hidden.shape[0] == self.routing.ids.shape[0], "hidden states and routing are of different rows"


class Dispatcher(Protocol):
    def __call__(self, x: Tensor, routing: Routing, prepare: Prepare) -> Dispatched:
        """`x` [tokens, hidden] and its routing, to what this rank's experts work on."""


class NoDispatch:
    """The tokens are here already."""

    def __call__(self, x: Tensor, routing: Routing, prepare: Prepare) -> Dispatched:
        return Dispatched(prepare(x), routing)


@dataclass(frozen=True, slots=True)
class GatherDispatch:
    """Rows of all ranks below each other, in rank order: [size * tokens, ...]. Three collectives, always in this order.

    Every rank brings the same number of rows; padding rows make up the difference.
    """

    collectives: Collectives

    def __call__(self, x: Tensor, routing: Routing, prepare: Prepare) -> Dispatched:
        gather = self.collectives.all_gather
        everywhere = Routing(gather(routing.ids), gather(routing.weights))
        return Dispatched(gather(prepare(x)), everywhere)

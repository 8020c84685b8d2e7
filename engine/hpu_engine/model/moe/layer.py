"""The MoE layer: router -> dispatcher -> experts -> combiner, and the shared experts beside them.

Shape rule: with one data rank the result has exactly the input's shape, two- or three-dimensional; where rows of other
ranks are left in it, `(rows_out, *input.shape[1:])`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hpu_engine.model.moe.combiner import Combiner
from hpu_engine.model.moe.dispatcher import Dispatcher
from hpu_engine.model.moe.experts import Experts
from hpu_engine.model.moe.router import Router


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """One MLP for every token. `is_partial`: it is cut over the ranks that the combiner adds up, so its result is added
    before; otherwise every rank has all of it, and it is added once, after.
    """

    mlp: Callable[[Tensor], Tensor]
    is_partial: bool


@dataclass(frozen=True, slots=True)
class MoeLayer:
    router: Router
    dispatcher: Dispatcher
    experts: Experts
    combiner: Combiner
    shared: SharedExperts | None = None

    def __post_init__(self) -> None:
        assert self.combiner.reduces or self.shared is None or self.shared.is_partial, (
            "whole shared experts in a result that is added up later would count once per rank"
        )

    def __call__(self, x: Tensor, is_real: Tensor | None = None) -> Tensor:
        """`x` [..., hidden]; rows where `is_real` [tokens] is False are padding and come out as 0."""
        flat = x.reshape(-1, x.shape[-1])
        routing = self.router(flat, is_real)
        dispatched = self.dispatcher(flat, routing, self.experts.prepare)
        partial = self.experts(dispatched, x.dtype)
        if self.shared is None:
            return self.combiner(partial).view(-1, *x.shape[1:])
        shared = self.shared.mlp(flat)
        if is_real is not None:
            shared = shared.masked_fill(~is_real[:, None], 0)
        if self.shared.is_partial:
            return self.combiner(partial + shared).view(-1, *x.shape[1:])
        return (self.combiner(partial) + shared).view(-1, *x.shape[1:])

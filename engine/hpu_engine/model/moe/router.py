"""The router: scores every expert for every token, selects top-k, weighs. Nothing else in the model knows how.

The order is fixed: logits -> scores of all experts in float32 -> selection by score plus correction bias, inside the
best groups if there are groups -> weights are the unbiased scores of the selected -> renormalised, scaled, cast to the
activations' type. The bias selects and never weighs. Equal scores go to the lower expert id on every device, so that
ranks which select apart select alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpu_engine.device.base import Linear
from hpu_engine.model.moe.routing import NOWHERE, Routing
from hpu_engine.planning.model.description import Moe


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """`groups` > 1: experts stand in equal groups, and only the `top_groups` best of them are open to a token; a group
    is as good as its two best selection scores together (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    `minimum` bounds the sum that weights are divided by; `scale` multiplies the weights at the end.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    minimum: float = 0.0
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    @classmethod
    def of(cls, moe: Moe) -> RoutingRule:
        router = moe.router
        return cls(top_k=moe.top_k, renormalise=router.renormalise, minimum=router.renormalise_minimum)


@dataclass(frozen=True, slots=True)
class Router:
    """`score` maps [tokens, hidden] to logits [tokens, experts], both as `dtype`: float32 where the family computes its
    logits so. `correction` [experts] float32.
    """

    rule: RoutingRule
    score: Linear
    dtype: torch.dtype
    correction: Tensor | None = None

    def __call__(self, x: Tensor, is_real: Tensor | None = None) -> Routing:
        """`x` [tokens, hidden]; rows where `is_real` [tokens] is False are padding and go nowhere."""
        return select(self.logits(x), self.rule, self.correction, x.dtype, is_real)

    def logits(self, x: Tensor) -> Tensor:
        """[tokens, experts]."""
        return self.score(x.to(self.dtype))


def select(
    logits: Tensor,
    rule: RoutingRule,
    correction: Tensor | None,
    dtype: torch.dtype,
    is_real: Tensor | None = None,
) -> Routing:
    """The routing of [tokens, experts] logits; a row's choice depends on that row alone."""
    wide = logits.float()
    scores = wide.softmax(-1) if rule.scoring == "softmax" else wide.sigmoid()
    preference = scores if correction is None else scores + correction
    if rule.groups > 1:
        preference = _inside_best_groups(preference, rule)
    ids = _first_best(preference, rule.top_k)
    weights = scores.gather(-1, ids)
    if rule.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(rule.minimum)
    if rule.scale != 1.0:
        weights = weights * rule.scale
    weights = weights.to(dtype)
    if is_real is not None:
        ids = ids.masked_fill(~is_real[:, None], NOWHERE)
        weights = weights.masked_fill(~is_real[:, None], 0)
    return Routing(ids, weights)


def _inside_best_groups(preference: Tensor, rule: RoutingRule) -> Tensor:
    """Experts outside of the best groups are out of reach."""
    grouped = preference.view(preference.shape[0], rule.groups, -1)
    best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    is_open = torch.zeros_like(best_two, dtype=torch.bool).scatter_(-1, _first_best(best_two, rule.top_groups), True)
    return grouped.masked_fill(~is_open.unsqueeze(-1), float("-inf")).view(preference.shape)


def _first_best(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest, largest first; the lower index first among equals. topk promises no order."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]

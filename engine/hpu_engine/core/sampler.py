"""From logits to tokens, for all emitting rows of a step at once.

Randomness has no state: the uniform number that chooses a row's token is a hash of the request's seed and the token's
position. A token therefore depends neither on batch mates nor on chunks, preemption or restarts, and a row that emits
nothing advances nothing. Greedy rows never see a temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpu_engine.core.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow."""


class SamplingFailed(Exception):
    """The logits of one row hold no choice (not a number): the model or its weights are at fault."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One emitting row: how to choose, and where in its request the chosen token will stand."""

    params: SamplingParams
    seed: int
    position: int

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW or self.params.top_k == 1


def uniforms(draws: Sequence[Draw]) -> Tensor:
    """[draws] float64 in [0, 1): SplitMix64 (Steele, Lea and Flood 2014) over seed and position, 53 bits."""
    seeds = np.array([draw.seed & 0xFFFFFFFFFFFFFFFF for draw in draws], dtype=np.uint64)
    positions = np.array([draw.position for draw in draws], dtype=np.uint64)
    state = _mix(_mix(seeds) + positions * np.uint64(0x9E3779B97F4A7C15))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int | SamplingFailed]:
    """`logits` [draws, vocab] float32, may be overwritten. One token id per row, or why the row has none."""
    best = logits.max(dim=-1)
    tokens: list[int] = best.indices.tolist()
    finite = torch.isfinite(best.values).tolist()
    random = [index for index, draw in enumerate(draws) if not draw.greedy and finite[index]]
    if random:
        # Rows are taken out only when some are greedy: a copy of [rows, vocab] costs as much as the softmax.
        subset = logits if len(random) == len(draws) else logits[torch.tensor(random)]
        for index, token in zip(random, _draw(subset, [draws[index] for index in random]), strict=True):
            tokens[index] = token
    return [
        token if is_finite else SamplingFailed("the model's logits are not finite")
        for token, is_finite in zip(tokens, finite, strict=True)
    ]


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    logits = logits / torch.tensor([[draw.params.temperature] for draw in draws], dtype=torch.float32)
    filtered = [draw.params.top_p < 1.0 or 0 < draw.params.top_k < logits.shape[-1] for draw in draws]
    chosen = uniforms(draws)
    if not any(filtered):
        return _inverse_cdf(logits.softmax(-1), chosen)
    # Sorting once serves both filters; rows without any draw from the sorted row just as well.
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    vocab = ordered.shape[-1]
    ranks = torch.arange(vocab)
    top_k = torch.tensor([[draw.params.top_k or vocab] for draw in draws])
    ordered = ordered.masked_fill(ranks >= top_k, float("-inf"))
    probabilities = ordered.softmax(-1)
    # A token stays while the mass before it is below top_p: at least one always does.
    before = probabilities.cumsum(-1) - probabilities
    top_p = torch.tensor([[draw.params.top_p] for draw in draws], dtype=torch.float32)
    probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    picked = torch.tensor(_inverse_cdf(probabilities, chosen))
    return ids.gather(-1, picked[:, None])[:, 0].tolist()


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> list[int]:
    """The first index whose cumulated weight exceeds uniform * total; never one of weight 0."""
    cumulated = weights.cumsum(-1)
    target = uniform.to(cumulated.dtype)[:, None] * cumulated[:, -1:]
    index = torch.searchsorted(cumulated, target, right=True)[:, 0]
    # Rounding can put the target at the very end, behind the last weight that counts.
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last).tolist()


def _mix(state: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    with np.errstate(over="ignore"):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))

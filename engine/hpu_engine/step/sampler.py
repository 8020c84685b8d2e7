"""From logits to tokens, for all emitting rows of a step at once.

Randomness has no state: the uniform number that chooses a row's token is a hash of the request's seed and the token's
position. A token therefore depends neither on batch mates nor on chunks, preemption or restarts, and a row that emits
nothing advances nothing. Greedy rows never see a temperature. Every operation here works row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hpu_engine.device.base import HOST
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.token_counts import TokenCounts
from hpu_engine.step.logit_adjustments import adjust_logits
from hpu_engine.step.sampling_cutoffs import cutoffs, drop_below
from hpu_engine.wire.messages import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have."""

_NOT_FINITE = "the model's logits are not finite"


class SamplingFailed(Exception):
    """The logits of one row are no numbers to choose or to score by: the model or its weights are at fault."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One emitting row: how to choose, the tokens before, how many of them are the prompt, and their counts."""

    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    prompt_len: int
    counts: TokenCounts = field(default_factory=TokenCounts)

    @property
    def greedy(self) -> bool:
        return self.params.is_greedy


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprobs: TokenLogprobs | None = None


def uniforms(draws: Sequence[Draw]) -> Tensor:
    """[draws] float64 in [0, 1): SplitMix64 (Steele, Lea and Flood 2014) over seed and position, 53 bits."""
    seeds = np.array([draw.seed & 0xFFFFFFFFFFFFFFFF for draw in draws], dtype=np.uint64)
    positions = np.array([len(draw.tokens) for draw in draws], dtype=np.uint64)
    state = _mix(_mix(seeds) + positions * np.uint64(0x9E3779B97F4A7C15))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled | SamplingFailed]:
    """`logits` [draws, vocab] float32. One result per row, or why the row has none."""
    # Log-probabilities are the model's own: of the logits before any adjustment.
    own = logits
    if any(draw.params.changes_logits for draw in draws):
        logits = logits.clone()
        for row, draw in zip(logits, draws, strict=True):
            adjust_logits(row, draw.params, draw.tokens, draw.prompt_len, draw.counts)
    # To know where the most likely token stands costs twice as much as to know how likely it is.
    if any(draw.greedy for draw in draws):
        peaks, places = logits.max(dim=-1)
        tokens: list[int] = places.tolist()
    else:
        peaks, tokens = logits.amax(dim=-1), [0] * len(draws)
    finite = torch.isfinite(peaks if logits is own else own.amax(dim=-1)).tolist()
    random = [index for index, draw in enumerate(draws) if not draw.greedy and finite[index]]
    for group in _alike(random, draws):
        # Rows are taken out only where some are of another kind: copying them costs as much as their softmax.
        rows = slice(None) if len(group) == len(draws) else torch.tensor(group, device=HOST)
        drawn = _draw(logits[rows], peaks[rows], [draws[index] for index in group])
        for index, token in zip(group, drawn, strict=True):
            tokens[index] = token
    results: list[Sampled | SamplingFailed] = []
    for index, token in enumerate(tokens):
        if not finite[index]:
            results.append(SamplingFailed(_NOT_FINITE))
            continue
        count = draws[index].params.logprobs
        results.append(Sampled(token, None if count is None else log_probabilities(own[index], token, count)))
    return results


def _alike(rows: Sequence[int], draws: Sequence[Draw]) -> list[list[int]]:
    """Rows with and rows without a filter, each group where it is not empty."""
    filtered = [index for index in rows if _is_filtered(draws[index].params)]
    free = [index for index in rows if not _is_filtered(draws[index].params)]
    return [group for group in (free, filtered) if group]


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def _draw(logits: Tensor, peaks: Tensor, draws: Sequence[Draw]) -> list[int]:
    """`peaks` [draws]: the largest of each row's `logits`."""
    temperatures = _column([draw.params.temperature for draw in draws])
    weights = (logits / temperatures).sub_(peaks[:, None] / temperatures).exp_()
    if _is_filtered(draws[0].params):
        drop_below(weights, cutoffs(weights, [draw.params for draw in draws]))
    return _inverse_cdf(weights, uniforms(draws))


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> list[int]:
    """The first index whose cumulated weight exceeds uniform * total; never one of weight 0."""
    cumulated = weights.cumsum(-1)
    target = uniform.to(cumulated.dtype)[:, None] * cumulated[:, -1:]
    # Rounding can put the target at the very end, behind the last weight that counts.
    index = torch.searchsorted(cumulated, target, right=True).clamp_max_(weights.shape[-1] - 1)
    tokens: list[int] = index[:, 0].tolist()
    for row in (weights.gather(1, index)[:, 0] == 0.0).nonzero()[:, 0].tolist():
        tokens[row] = int(weights[row].nonzero()[-1])
    return tokens


def log_probabilities(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Of `token`, and of the `count` most likely tokens, from the model's own `logits` [vocab].

    Raises SamplingFailed for a row that no token could be drawn from.
    """
    values = logits.log_softmax(-1)
    logprob = float(values[token])
    # A row whose largest logit is not finite has no other log-probability than NaN, whatever the token.
    if math.isnan(logprob):
        raise SamplingFailed(_NOT_FINITE)
    best = values.topk(count)
    top = tuple(zip(best.indices.tolist(), map(_finite, best.values.tolist()), strict=True))
    return TokenLogprobs(token_id=token, logprob=_finite(logprob), top=top)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=HOST)[:, None]


def _mix(state: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    with np.errstate(over="ignore"):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))

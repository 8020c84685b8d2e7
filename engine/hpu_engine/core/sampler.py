"""From logits to tokens, for all emitting rows of a step at once.

Randomness has no state: the uniform number that chooses a row's token is a hash of the request's seed and the token's
position. A token therefore depends neither on batch mates nor on chunks, preemption or restarts, and a row that emits
nothing advances nothing. Greedy rows never see a temperature. Every operation here works row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpu_engine.core.messages import TokenLogprobs
from hpu_engine.core.sampling_params import SamplingParams
from hpu_engine.model.logit_adjustments import adjust_logits

HEADS = (256, 4096)
"""How many of the largest logits are sorted for a nucleus, one try after the other; a flatter row is sorted whole."""


LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have."""


class SamplingFailed(Exception):
    """The logits of one row hold no choice (not a number): the model or its weights are at fault."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One emitting row: how to choose, the tokens before, and how many of them are the prompt."""

    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    prompt_len: int

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
    finite = torch.isfinite(logits.amax(dim=-1)).tolist()
    if any(draw.params.changes_logits for draw in draws):
        logits = logits.clone()
        for row, draw in zip(logits, draws, strict=True):
            adjust_logits(row, draw.params, draw.tokens, draw.prompt_len)
    tokens: list[int] = logits.max(dim=-1).indices.tolist()
    random = [index for index, draw in enumerate(draws) if not draw.greedy and finite[index]]
    for group in _alike(random, draws):
        # Rows are taken out only where some are of another kind: copying them costs as much as their softmax.
        subset = logits if len(group) == len(draws) else logits[torch.tensor(group)]
        for index, token in zip(group, _draw(subset, [draws[index] for index in group]), strict=True):
            tokens[index] = token
    results: list[Sampled | SamplingFailed] = []
    for index, token in enumerate(tokens):
        if not finite[index]:
            results.append(SamplingFailed("the model's logits are not finite"))
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


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    scaled = logits / _column([draw.params.temperature for draw in draws])
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    if _is_filtered(draws[0].params):
        weights = weights.masked_fill_(weights < _cutoffs(weights, draws), 0.0)
    return _inverse_cdf(weights, uniforms(draws))


def _cutoffs(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """[rows, 1]: the smallest weight that stays, by top-k, then top-p of what that leaves, then min-p.

    `weights` [rows, vocab], 1 for the most likely token. Tokens as likely as the last one that stays stay too, so that
    the order in which a library sorts equals decides nothing.
    """
    vocab = weights.shape[-1]
    cutoffs = torch.empty(len(draws), 1)
    left = list(range(len(draws)))
    for head in (*(head for head in HEADS if head < vocab), vocab):
        rows = torch.tensor(left)
        own = weights if len(left) == len(draws) else weights[rows]
        ordered = own.topk(head).values if head < vocab else own.sort(dim=-1, descending=True).values
        cutoffs[rows], is_enough = _sorted_cutoffs(own, ordered, [draws[index] for index in left])
        left = [index for index, enough in zip(left, is_enough.tolist(), strict=True) if not enough]
        if not left:
            break
    return torch.maximum(cutoffs, _column([draw.params.min_p for draw in draws]))


def _sorted_cutoffs(weights: Tensor, ordered: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Cutoffs [rows, 1] by top-k and top-p from the largest weights `ordered` [rows, n], and which rows n sufficed."""
    vocab, n = weights.shape[-1], ordered.shape[-1]
    top_k = torch.tensor([[min(draw.params.top_k or vocab, vocab)] for draw in draws])
    top_p = _column([draw.params.top_p for draw in draws])
    kth = torch.where(top_k < vocab, ordered.gather(1, (top_k - 1).clamp_max(n - 1)), 0.0)
    reaches_k = (top_k <= n) | (top_k == vocab)
    if bool((top_p == 1.0).all()):
        return kth, reaches_k[:, 0]
    mass = _total(weights.masked_fill(weights < kth, 0.0))
    # A token stays while the mass before it is below top_p: the first always does.
    before = ordered.cumsum(-1) - ordered
    inside = ((before < top_p * mass) & (ordered >= kth)).sum(-1, keepdim=True)
    pth = torch.where(top_p < 1.0, ordered.gather(1, (inside - 1).clamp_min(0)), 0.0)
    is_enough = reaches_k & ((top_p == 1.0) | (inside < n)) if n < vocab else torch.ones_like(reaches_k)
    return torch.maximum(kth, pth), is_enough[:, 0]


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> list[int]:
    """The first index whose cumulated weight exceeds uniform * total; never one of weight 0."""
    cumulated = weights.cumsum(-1)
    target = uniform.to(cumulated.dtype)[:, None] * cumulated[:, -1:]
    index = torch.searchsorted(cumulated, target, right=True)[:, 0]
    tokens = index.tolist()
    for row, token in enumerate(tokens):
        # Rounding can put the target at the very end, behind the last weight that counts.
        if token >= weights.shape[-1] or float(weights[row, token]) == 0.0:
            tokens[row] = int(weights[row].nonzero()[-1])
    return tokens


def _total(weights: Tensor) -> Tensor:
    """[rows, 1]. A cumulated sum runs through a row in one order; a plain sum of few long rows is cut among threads."""
    return weights.cumsum(-1)[:, -1:]


def log_probabilities(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Of `token`, and of the `count` most likely tokens, from the model's own `logits` [vocab]."""
    values = logits.log_softmax(-1)
    best = values.topk(count)
    top = tuple(zip(best.indices.tolist(), map(_finite, best.values.tolist()), strict=True))
    return TokenLogprobs(token_id=token, logprob=_finite(float(values[token])), top=top)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def _mix(state: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    with np.errstate(over="ignore"):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))

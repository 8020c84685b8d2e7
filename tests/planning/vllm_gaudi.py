"""Bucket generators and look-up of vllm-gaudi, rebuilt from their formulas: oracles for the recipe comparison.

A bucket is (batch, query, context): prompt buckets have a query above 1 and count context blocks of one row, decode
buckets have query 1 and count the blocks of all rows. Strategies: exponential (default), linear, padding-aware.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, log2

Bucket = tuple[int, int, int]


@dataclass(frozen=True)
class Settings:
    """`max_prefill_seqs` is the strategy's default of one prompt per forward."""

    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    max_blocks: int
    max_prefill_seqs: int = 1


def exponential_values(least: int, step: int, most: int, count: int) -> list[int]:
    """least * (most / least) ** (i / (count - 1)), rounded up to `step`; a least of 0 or 1 is added beside `step`."""
    values = [least] if least in (0, 1) else []
    base = step if least in (0, 1) else least
    if most < base:
        return sorted({*values, most})
    for i in range(count):
        value = base * (most / base) ** (i / (count - 1)) if count > 1 else most
        # A value that is a multiple of `step` up to rounding of the power must not be lifted to the next one.
        values.append(min(most, ceil(round(value / step, 9)) * step))
    return sorted({*values, most})


def linear_values(least: int, step: int, most: int) -> list[int]:
    """Powers of two times `least` below `step`, then multiples of `step`; 0 is a value where `least` is 0."""
    values = [0] if least == 0 else []
    value = max(least, 1)
    while value < min(step, most):
        values.append(value)
        value *= 2
    values.extend(range(step, most + 1, step))
    return sorted({v for v in values if v <= most} | {most})


def padded_values(least: int, step: int, most: int, pad_max: int, pad_percent: int = 25) -> list[int]:
    """Doubling up to `step`, then the multiples of `step` that keep padding within both limits."""
    values = [0] if least == 0 else []
    value = max(least, 1)
    while value < min(step, most):
        values.append(value)
        value *= 2
    kept = values[-1] if values else 0
    multiples = list(range(step, most + 1, step))
    for current, following in zip(multiples, [*multiples[1:], None], strict=True):
        padding = following - (kept + 1) if following is not None else 0
        too_much = following is not None and (padding > pad_max or padding / following * 100 > pad_percent)
        if too_much or current % pad_max == 0 or following is None:
            values.append(current)
            kept = current
    return sorted({*values, most})


def exponential(s: Settings) -> list[Bucket]:
    bs = s.block_size
    queries = exponential_values(bs, bs, s.max_batched_tokens, ceil(log2(s.max_batched_tokens)))
    long = s.max_model_len >= 8192
    context = (s.max_model_len - (s.max_batched_tokens if long else bs)) // bs
    contexts = exponential_values(0, 1, context, ceil(log2(context)) + 1) if context > 0 else [0]
    prompts = [(1, q, c) for q in queries for c in contexts]
    if long:
        prompts += [(1, q, (s.max_model_len - q) // bs) for q in queries if q <= s.max_model_len]
    rows = exponential_values(1, 2, s.max_num_seqs, ceil(log2(s.max_num_seqs)) + 1)
    most = min(ceil(s.max_model_len / bs) * s.max_num_seqs, 3 * s.max_blocks)
    blocks = exponential_values(1, s.max_num_seqs, most, ceil(log2(most)) + 1)
    return _filtered(s, prompts, [(r, 1, b) for r in rows for b in blocks])


def linear(s: Settings) -> list[Bucket]:
    bs = s.block_size
    queries = linear_values(bs, bs, s.max_batched_tokens)
    contexts = linear_values(0, 1, (s.max_model_len - bs) // bs)
    rows = linear_values(1, 32, s.max_num_seqs)
    blocks = linear_values(1, bs, max(ceil(s.max_model_len * s.max_num_seqs / bs), bs))
    prompts = [(1, q, c) for q in queries for c in contexts]
    return _filtered(s, prompts, [(r, 1, b) for r in rows for b in blocks])


def padding_aware(s: Settings) -> list[Bucket]:
    bs = s.block_size
    queries = padded_values(bs, bs, s.max_batched_tokens, ceil(s.max_batched_tokens / 4))
    contexts = padded_values(0, 2, (s.max_model_len - bs) // bs, ceil(s.max_batched_tokens / bs))
    rows = padded_values(1, 2, s.max_num_seqs, ceil(s.max_num_seqs / 4))
    most = max(ceil(s.max_model_len * s.max_num_seqs / bs), bs)
    blocks = padded_values(1, bs, most, ceil(most / 4))
    prompts = [(1, q, c) for q in queries for c in contexts]
    return _filtered(s, prompts, [(r, 1, b) for r in rows for b in blocks])


GENERATORS = {"exponential": exponential, "linear": linear, "padding-aware": padding_aware}


def _filtered(s: Settings, prompts: list[Bucket], decodes: list[Bucket]) -> list[Bucket]:
    bs = s.block_size
    kept = {
        (b, q, c)
        for b, q, c in prompts
        if c <= ceil((s.max_model_len - 1) / bs) and q <= s.max_model_len and b * q <= s.max_batched_tokens
    }
    kept |= {(b, 1, min(c, b * ceil(s.max_model_len / bs))) for b, _, c in decodes if b <= c}
    return sorted(kept)


class Lookup:
    """The first bucket, in sorted order, that is at least the wanted one in all three; a made-up one on a miss."""

    def __init__(self, s: Settings, buckets: list[Bucket]) -> None:
        self._settings = s
        self._prompts = [b for b in buckets if b[1] > 1]
        self._decodes = [b for b in buckets if b[1] == 1]
        self.misses = 0

    def find(self, wanted: Bucket, *, prompt: bool) -> Bucket:
        buckets = self._prompts if prompt else self._decodes
        for bucket in buckets[bisect_left(buckets, wanted) :]:
            if all(have >= need for have, need in zip(bucket, wanted, strict=True)):
                return bucket
        self.misses += 1
        return self._made_up(wanted, prompt=prompt)

    def _made_up(self, wanted: Bucket, *, prompt: bool) -> Bucket:
        s = self._settings
        batch, query, context = wanted
        batch = min(_grown(batch, 2), s.max_num_seqs)
        if not prompt:
            return (batch, 1, _grown(context, 32))
        return (1, min(_grown(query, 32), s.max_batched_tokens), _grown(context, 32))


def _grown(n: int, base: int) -> int:
    """Rounded up to a multiple of ceil(cube root of n) x base."""
    if n == 0:
        return 0
    step = ceil(round(math.pow(n, 1 / 3), 9)) * base
    return ceil(n / step) * step

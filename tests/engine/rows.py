"""Steps of made-up requests for what measures steps."""

from __future__ import annotations

from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Row, Step

GREEDY = SamplingParams(temperature=0.0)


def rows_of(count: int, context_len: int, new_len: int, block_size: int) -> Step:
    """`count` rows, each with blocks of its own; lengths differ by a few tokens like those of real requests."""
    rows, next_block = [], 1
    for index in range(count):
        context = max(0, context_len - index % 7)
        request = Request(str(index), [1 + index % 50] * (context + new_len), GREEDY, seed=0)
        needed = -(-(context + new_len) // block_size)
        request.blocks = list(range(next_block, next_block + needed))
        next_block += needed
        rows.append(Row(request, context, new_len, emits=True))
    return Step(tuple(rows))

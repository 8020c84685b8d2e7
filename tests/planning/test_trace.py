"""The scheduler in miniature makes the steps that its rules say, and histograms count them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_engine.planning.shapes.limits import Kind, StepLimits, StepShape
from hpu_engine.planning.shapes.trace import Lengths, assumed_lengths, fitted_histogram, observed_histogram, simulate


@dataclass
class Served:
    request: Lengths
    context: int = 0
    produced: int = 0


def restated(requests: list[Lengths], limits: StepLimits, most: int) -> list[StepShape]:
    """The same rules request by request, with nothing counted ahead."""
    size, free = limits.block_size, limits.kv_blocks or 0
    waiting = list(requests)
    running: list[Served] = []
    steps = []

    def blocks(request: Lengths) -> int:
        return -(-(request.prompt + request.output) // size)

    while waiting or running:
        while waiting and len(running) < most and blocks(waiting[0]) <= free:
            free -= blocks(waiting[0])
            running.append(Served(waiting.pop(0)))
        decoding = [served for served in running if served.produced]
        budget = limits.max_batched_tokens - len(decoding)
        decode_blocks = sum(-(-(served.context + 1) // size) for served in decoding)
        prefill, sampled = [], len(decoding)
        for served in running:
            remaining = served.request.prompt - served.context
            if served.produced:
                continue
            chunk = min(remaining, budget)
            if size < chunk < remaining:
                chunk -= chunk % size
            if chunk == 0:
                break
            prefill.append((chunk, -(-served.context // size)))
            served.context += chunk
            budget -= chunk
            if chunk < remaining:
                break
            served.produced = 1
            sampled += 1
        for served in decoding:
            served.context += 1
            served.produced += 1
        steps.append(StepShape(tuple(prefill), len(decoding), decode_blocks, sampled))
        for served in [s for s in running if s.produced == s.request.output]:
            running.remove(served)
            free += blocks(served.request)
    return steps


@settings(max_examples=150)
@given(
    requests=st.lists(st.builds(Lengths, st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12),
    most=st.integers(1, 5),
    budget=st.integers(5, 70),
    block=st.sampled_from([1, 4, 16]),
    pool=st.integers(100, 400),
)
def test_the_counted_steps_are_those_of_the_rules(
    requests: list[Lengths], most: int, budget: int, block: int, pool: int
) -> None:
    limits = StepLimits(101, 5, budget, block, pool)
    assert list(simulate(requests, limits, lambda step: most)) == restated(requests, limits, most)


def test_a_histogram_counts_calls_per_step() -> None:
    steps = [StepShape(((10, 0), (10, 0)), 2, 5, 3), StepShape((), 2, 5, 2)]
    seen = observed_histogram(steps).calls
    assert seen[Kind.FLAT] == {(22, 0): 0.5, (2, 0): 0.5}
    assert seen[Kind.PREFILL] == {(10, 0): 1.0}
    assert seen[Kind.DECODE] == {(2, 5): 1.0}
    assert seen[Kind.SAMPLER] == {(3, 0): 0.5, (2, 0): 0.5}


def test_assumed_lengths_are_the_same_each_time_and_cover_every_order_of_magnitude() -> None:
    limits = StepLimits(32_768, 64, 8192, 128)
    lengths = assumed_lengths(limits)
    assert lengths == assumed_lengths(limits)
    decades = [sum(10**d <= request.prompt < 10 ** (d + 1) for request in lengths) for d in range(4)]
    assert min(decades) > 0.7 * max(decades)
    assert all(request.prompt + request.output <= 32_768 for request in lengths)


def test_a_trace_without_a_fitting_request_is_refused() -> None:
    with pytest.raises(ValueError, match="below the model length 100"):
        fitted_histogram([Lengths(500, 5)], StepLimits(100, 4, 100, 16))

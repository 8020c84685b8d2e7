"""From a step to its shapes: every step of the real scheduler is covered, and nothing is padded where nothing asks."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpu_engine.planning.shapes.buckets import plan_buckets
from hpu_engine.planning.shapes.choice import Histogram
from hpu_engine.planning.shapes.limits import Kind, StepLimits
from hpu_engine.scheduling.kv_blocks import BlockPool
from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Limits, RequestRefused, Scheduler, Step
from hpu_engine.step.input import RowInput, StepInput, input_of
from hpu_engine.step.shapes import (
    MOST_SHAPES,
    SCORED_AT_ONCE,
    WORDS_LIMIT,
    FirstSeen,
    Fit,
    Recipe,
    ShapeMap,
    StepShapes,
)
from tests.core.simulated_model import SimulatedModel
from tests.planning.recipe_comparison import reference_cost

NOTHING_KNOWN = Histogram({}, unseen=1.0)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=1),
    SamplingParams(),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=1.1),
    SamplingParams(temperature=0.0, min_tokens=1),
    SamplingParams(temperature=0.0, logit_bias={1: 2.0}),
)


@st.composite
def served(draw: st.DrawFn) -> tuple[StepLimits, list[Request]]:
    """Limits of any kind, also those that the product refuses, and requests of any length and settings."""
    block = draw(st.sampled_from([1, 4, 8]))
    blocks = draw(st.integers(1, 14))
    length = min(draw(st.integers(2, 60)), blocks * block)
    budget = draw(st.one_of(st.integers(1, 70), st.sampled_from([max(1, block - 1), block, block + 1])))
    limits = StepLimits(max(2, length), draw(st.integers(1, 6)), budget, block, blocks)
    requests = []
    for number in range(draw(st.integers(1, 8))):
        prompt = [draw(st.integers(0, 1)) for _ in range(draw(st.integers(1, limits.max_model_len)))]
        params = draw(st.sampled_from(PARAMS))
        scored = draw(st.sampled_from([None, None, 1]))
        own = SamplingParams(
            **{name: getattr(params, name) for name in params.__struct_fields__ if name not in FREE},
            max_tokens=draw(st.integers(1, 20)),
            prompt_logprobs=scored,
        )
        sibling = str(number - 1) if number and draw(st.booleans()) else None
        requests.append(Request(str(number), prompt, own, seed=0, shares_prompt_with=sibling))
    return limits, requests


FREE = ("max_tokens", "prompt_logprobs")


def steps_of(limits: StepLimits, requests: list[Request], check: ShapeMap) -> list[tuple[Step, StepShapes]]:
    """What the scheduler makes of them, each step mapped as it is scheduled (its blocks are moved afterwards)."""
    assert limits.kv_blocks is not None
    pool = BlockPool(limits.kv_blocks, limits.block_size)
    scheduler = Scheduler(Limits(limits.max_batched_tokens, limits.max_num_seqs, limits.max_model_len), pool)
    for request in requests:
        try:
            scheduler.add(request)
        except RequestRefused:
            continue
    model, made = SimulatedModel(limits.block_size), []
    while scheduler.has_work:
        step = scheduler.schedule()
        made.append((step, check.of(input_of(step.rows, limits.block_size))))
        scheduler.commit(step, model.run(step), [()] * len(step.rows))
    return made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(served(), st.integers(5, 40))
def test_every_step_of_any_scheduler_runs_in_buckets_that_hold_it(
    case: tuple[StepLimits, list[Request]], recipes: int
) -> None:
    limits, requests = case
    buckets = plan_buckets(limits, reference_cost(limits.block_size), NOTHING_KNOWN, recipes=recipes)
    known = {(bucket.kind, bucket.size) for bucket in buckets}
    for step, shapes in steps_of(limits, requests, ShapeMap(limits.block_size, buckets)):
        assert {(recipe.kind, recipe.size) for recipe in shapes.recipes()} <= known
        size = limits.block_size
        assert shapes.flat.count == sum(row.new_len for row in step.rows) <= shapes.flat.padded
        chunks = [row for row in step.rows if row.new_len > 1]
        assert len(shapes.chunks) == len(chunks)
        for row, fit in zip(chunks, shapes.chunks, strict=True):
            assert fit.count == row.new_len <= fit.size[0]
            assert math.ceil(row.context_len / size) <= fit.size[1]
        singles = [row for row in step.rows if row.new_len == 1]
        for call in shapes.singles:
            own, singles = singles[: call.count], singles[call.count :]
            assert 0 < len(own) <= call.size[0]
            assert sum(math.ceil((row.context_len + 1) / size) for row in own) <= call.size[1]
        assert not singles, "rows are left over"
        emitting = [row for row in step.rows if row.emits]
        assert shapes.outputs.count == len(emitting) <= shapes.outputs.padded
        assert sum(piece.count for piece in shapes.scores) == sum(row.scores for row in step.rows)
        assert all(0 < piece.count <= piece.padded for piece in shapes.scores)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(served())
def test_without_buckets_shapes_are_the_steps_own(case: tuple[StepLimits, list[Request]]) -> None:
    limits, requests = case
    size = limits.block_size
    for step, shapes in steps_of(limits, requests, ShapeMap(size)):
        singles = [row.context_len // size + 1 for row in step.rows if row.new_len == 1]
        assert shapes.flat.size == (sum(row.new_len for row in step.rows), 0)
        assert [fit.size for fit in shapes.chunks] == [
            (row.new_len, math.ceil(row.context_len / size)) for row in step.rows if row.new_len > 1
        ]
        assert [fit.size for fit in shapes.singles] == ([(len(singles), sum(singles))] if singles else [])
        assert shapes.outputs.size[0] == sum(row.emits for row in step.rows)
        assert all(fit.count <= SCORED_AT_ONCE for fit in shapes.scores)


def test_an_empty_step_runs_nothing() -> None:
    limits = StepLimits(64, 4, 32, 8, 10)
    buckets = plan_buckets(limits, reference_cost(8), NOTHING_KNOWN, recipes=20)
    for shape_map in (ShapeMap(8), ShapeMap(8, buckets)):
        shapes = shape_map.of(StepInput())
        assert list(shapes.recipes()) == []
        assert str(shapes) == ""


def test_rows_whose_shared_blocks_exceed_every_bucket_are_run_in_several_calls() -> None:
    limits = StepLimits(64, 4, 32, 8, kv_blocks=10)
    buckets = plan_buckets(limits, reference_cost(8), NOTHING_KNOWN, recipes=20)
    row = RowInput([0], [1, 2, 3, 4, 5, 6, 7, 8], context_len=59, emits=True)
    calls = ShapeMap(8, buckets).of(StepInput((row,) * 4)).singles
    assert [call.count for call in calls] == [1, 1, 1, 1]
    assert all(call.size[1] >= 8 for call in calls)


def test_a_recipe_is_counted_once_and_only_after_warm_up() -> None:
    seen = FirstSeen()
    flat, other = Recipe(Kind.FLAT, (4, 0)), Recipe(Kind.FLAT, (5, 0))
    seen.see([flat, flat])
    seen.end_warm_up()
    seen.see([flat])
    assert seen.after_warm_up == 0
    seen.see([other, other])
    seen.see([other])
    assert seen.after_warm_up == 1


def test_what_is_remembered_and_what_is_said_is_bounded() -> None:
    seen = FirstSeen()
    seen.end_warm_up()
    seen.see(Recipe(Kind.FLAT, (number, 0)) for number in range(MOST_SHAPES + 100))
    assert seen.after_warm_up == MOST_SHAPES
    nothing = Fit(0, (0, 0))
    many = tuple(Fit(number, (number, number)) for number in range(1, 500))
    assert len(str(StepShapes(nothing, many, (), nothing, ()))) == WORDS_LIMIT
    same = StepShapes(Fit(9, (16, 0)), (Fit(4, (8, 2)),) * 3, (), nothing, ())
    assert str(same) == "flat 16 tokens; 3 x prefill 8 tokens + 2 blocks"

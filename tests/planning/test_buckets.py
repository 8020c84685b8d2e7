"""Every shape a scheduler can emit has a bucket, the cheapest one, found in microseconds."""

from __future__ import annotations

import random
import timeit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_engine.planning.shapes.buckets import BucketSet, UncoveredShape, plan_buckets, uncovered
from hpu_engine.planning.shapes.choice import Histogram, TooFewRecipes, choose_buckets
from hpu_engine.planning.shapes.lattice import lattices
from hpu_engine.planning.shapes.limits import Kind, Size, StepLimits, StepShape, split_decode
from hpu_engine.planning.shapes.trace import assumed_histogram
from hpu_engine.scheduling.kv_blocks import BlockPool
from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Limits, RequestRefused, Row, Scheduler, Step
from tests.planning.recipe_comparison import reference_cost

COST = reference_cost(128)
NOTHING_KNOWN = Histogram({}, unseen=1.0)


@st.composite
def limits_of_any_kind(draw: st.DrawFn, *, most_length: int = 5000) -> StepLimits:
    """Lengths below the block size, just above multiples of it, budgets above the model length, one to three rows."""
    block = draw(st.sampled_from([1, 8, 16, 128]))
    length = draw(st.one_of(st.integers(1, most_length), st.sampled_from([block - 1, block, block + 1, 3 * block + 1])))
    rows = draw(st.one_of(st.integers(1, 3), st.integers(1, 300)))
    budget = draw(st.one_of(st.integers(1, 9000), st.sampled_from([length, length + 1, block, block - 1, 2 * length])))
    blocks = draw(st.one_of(st.none(), st.integers(1, 20_000)))
    return StepLimits(max(1, length), rows, max(1, budget), block, blocks)


def emittable(limits: StepLimits, kind: Kind) -> set[Size]:
    """All shapes of `kind`, restated without any of the planner's bounds."""
    length, size = limits.max_model_len, limits.block_size
    rows = range(1, min(limits.max_num_seqs, limits.max_batched_tokens) + 1)
    match kind:
        case Kind.FLAT:
            most = min(limits.max_batched_tokens, limits.max_num_seqs * length)
            return {(tokens, 0) for tokens in range(1, most + 1)}
        case Kind.PREFILL:
            return {
                (new, (context + size - 1) // size)
                for new in range(1, min(limits.max_batched_tokens, length) + 1)
                for context in range(length - new + 1)
            }
        case Kind.DECODE:
            per_row = {(context + 1 + size - 1) // size for context in range(length)}
            pool = limits.kv_blocks if limits.kv_blocks is not None else max(rows) * max(per_row)
            return {
                (n, blocks) for n in rows for blocks in range(n, n * max(per_row) + 1) if blocks <= max(pool, *per_row)
            }
        case Kind.SAMPLER:
            return {(n, 0) for n in rows}


@settings(max_examples=30)
@given(limits=limits_of_any_kind(), recipes=st.integers(5, 150))
def test_any_configuration_is_covered_whatever_the_number_of_recipes(limits: StepLimits, recipes: int) -> None:
    buckets = plan_buckets(limits, COST, NOTHING_KNOWN, recipes=recipes)
    assert buckets.recipes <= recipes
    assert list(uncovered(buckets, limits)) == []
    for kind in Kind:
        assert buckets.of(kind)[-1].size == limits.largest(kind)


@settings(max_examples=60)
@given(limits=limits_of_any_kind(most_length=70), recipes=st.integers(5, 40))
def test_enumeration_of_small_configurations_agrees_with_the_proof(limits: StepLimits, recipes: int) -> None:
    small = StepLimits(
        limits.max_model_len,
        min(limits.max_num_seqs, 6),
        min(limits.max_batched_tokens, 120),
        limits.block_size,
        limits.kv_blocks,
    )
    buckets = plan_buckets(small, COST, NOTHING_KNOWN, recipes=recipes)
    for kind in Kind:
        shapes = emittable(small, kind)
        for first, second in shapes:
            bucket = buckets.find(kind, first, second)
            assert bucket.size[0] >= first
            assert bucket.size[1] >= second
        # The proof looks at maximal shapes only; none of them is made up, and together they dominate every shape.
        maximal = set(small.maximal(kind))
        assert all(any(a <= c and b <= d for c, d in maximal) for a, b in shapes)
        if kind is Kind.PREFILL:
            assert maximal <= shapes


@settings(max_examples=40)
@given(limits=limits_of_any_kind(most_length=60))
def test_a_cell_is_a_point_exactly_when_a_shape_of_it_can_occur(limits: StepLimits) -> None:
    small = StepLimits(limits.max_model_len, min(limits.max_num_seqs, 5), min(limits.max_batched_tokens, 80),
                       limits.block_size, limits.kv_blocks)  # fmt: skip
    for kind in Kind:
        firsts, seconds = lattices(kind, small, 50)
        shapes = emittable(small, kind)
        for low, high in zip((0, *firsts), firsts, strict=False):
            for left, right in zip((-1, *seconds), seconds, strict=False):
                expected = any(low < a <= high and left < b <= right for a, b in shapes)
                assert small.can_emit(kind, (low, max(left, 0)), (high, right)) >= expected, (kind, high, right)


@settings(max_examples=25)
@given(limits=limits_of_any_kind(), recipes=st.integers(5, 120), seed=st.integers(0, 1000))
def test_the_cheapest_covering_bucket_is_found(limits: StepLimits, recipes: int, seed: int) -> None:
    buckets = plan_buckets(limits, COST, NOTHING_KNOWN, recipes=recipes)
    draw = random.Random(seed)
    for kind in Kind:
        most_first, most_second = limits.largest(kind)
        for _ in range(20):
            first, second = draw.randint(1, most_first), draw.randint(0, most_second)
            covering = [b for b in buckets.of(kind) if b.size[0] >= first and b.size[1] >= second]
            assert buckets.find(kind, first, second).seconds == min(b.seconds for b in covering)


class Sampled(int):
    """A token as a sampler gives it."""

    @property
    def token(self) -> int:
        return int(self)

    @property
    def logprobs(self) -> None:
        return None


def shape_of(step: Step, block_size: int) -> tuple[StepShape, list[int]]:
    """A real scheduler's step as the planner sees it, and the blocks of each decode row."""

    def decodes(row: Row) -> bool:
        return row.new_len == 1 and row.emits and row.context_len >= row.request.prompt_len

    decode_blocks = [-(-(row.context_len + 1) // block_size) for row in step.rows if decodes(row)]
    prefill = tuple((row.new_len, -(-row.context_len // block_size)) for row in step.rows if not decodes(row))
    sampled = sum(row.emits for row in step.rows)
    return StepShape(prefill, len(decode_blocks), sum(decode_blocks), sampled), decode_blocks


@pytest.mark.parametrize("seed", range(12))
def test_every_step_of_the_real_scheduler_has_its_buckets(seed: int) -> None:
    draw = random.Random(seed)
    block, length = draw.choice([(16, 100), (16, 15), (8, 65), (128, 300)])
    rows, budget = draw.choice([1, 2, 3, 17]), draw.choice([block, block + 1, 64, 500])
    budget = max(budget, rows)
    pool = BlockPool(draw.choice([-(-length // block), 40, 300]), block)
    limits = StepLimits(length, rows, budget, block, pool.num_blocks)
    buckets = plan_buckets(limits, COST, NOTHING_KNOWN, recipes=12)
    scheduler = Scheduler(Limits(budget, rows, length), pool)
    shared = [draw.randrange(50) for _ in range(length)]
    for number in range(40):
        prompt = shared[: draw.randint(1, length - 1)] if draw.random() < 0.5 else []
        prompt = prompt or [draw.randrange(50) for _ in range(draw.randint(1, length - 1))]
        params = SamplingParams(max_tokens=draw.randint(1, length))
        try:
            scheduler.add(Request(str(number), prompt, params, 0))
        except RequestRefused:
            continue
    steps = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        shape, decode_blocks = shape_of(step, block)
        assert sum(rows for rows, _ in split_decode(decode_blocks, limits.decode_blocks)) == len(decode_blocks)
        assert len(buckets.decode_calls(decode_blocks)) >= bool(decode_blocks)
        for kind, size in shape.parts():
            if kind is not Kind.DECODE:
                assert buckets.covers(kind, size), (kind, size, limits)
        scheduler.commit(step, [Sampled(draw.randrange(50)) if row.emits else None for row in step.rows])
        steps += 1
    assert steps > 10


def test_rows_that_share_blocks_are_split_where_no_bucket_holds_them_all() -> None:
    assert list(split_decode([3, 3, 3, 1], 6)) == [(2, 6), (2, 4)]
    assert list(split_decode([], 6)) == []
    limits = StepLimits(1024, 8, 512, 128, kv_blocks=10)
    buckets = plan_buckets(limits, COST, NOTHING_KNOWN, recipes=20)
    calls = buckets.decode_calls([8] * 8)
    assert len(calls) == 8
    assert all(call.size[1] >= 8 for call in calls)


def test_a_shape_beyond_the_limits_is_refused_with_the_largest() -> None:
    limits = StepLimits(1024, 8, 512, 128)
    buckets = plan_buckets(limits, COST, NOTHING_KNOWN, recipes=20)
    with pytest.raises(UncoveredShape, match=r"\(513, 0\); the largest shape under the limits is \(512, 0\)"):
        buckets.find(Kind.FLAT, 513)


def test_a_set_that_leaves_a_hole_cannot_be_made() -> None:
    limits = StepLimits(1024, 8, 512, 128)
    sizes = choose_buckets(limits, COST, NOTHING_KNOWN, recipes=20)
    holed = sizes | {Kind.PREFILL: tuple(size for size in sizes[Kind.PREFILL] if size != (512, 8))}
    with pytest.raises(UncoveredShape):
        BucketSet(limits, COST, holed)


def test_too_few_recipes_are_refused_with_the_number_needed() -> None:
    with pytest.raises(TooFewRecipes, match="at least 5"):
        plan_buckets(StepLimits(1024, 8, 512, 128), COST, NOTHING_KNOWN, recipes=4)


def test_more_recipes_never_pad_more() -> None:
    limits = StepLimits(4096, 64, 2048, 128, 3000)
    seen = assumed_histogram(limits)

    def padded(recipes: int) -> float:
        buckets = plan_buckets(limits, COST, seen, recipes=recipes)
        return sum(
            weight * COST.work_seconds(kind, buckets.find(kind, *size).size)
            for kind in Kind
            for size, weight in seen.calls[kind].items()
        )

    measured = [padded(recipes) for recipes in (8, 20, 50, 100, 200)]
    assert measured == sorted(measured, reverse=True)


def best_in_one_size(values: list[int], weights: list[float], count: int) -> float:
    """Least weighted sum of what each value is padded to, over all choices of `count` values: dynamic programming."""
    until = [0.0]
    for weight in weights:
        until.append(until[-1] + weight)
    best = [0.0] + [float("inf")] * len(values)
    for _ in range(count):
        best = [0.0] + [
            min(best[i] + (until[j] - until[i]) * values[j - 1] for i in range(j)) for j in range(1, len(values) + 1)
        ]
    return best[-1]


@pytest.mark.parametrize("seed", range(6))
def test_the_greedy_choice_in_one_size_is_close_to_the_optimum(seed: int) -> None:
    draw = random.Random(seed)
    limits = StepLimits(1, 1024, 1024, 1, 1024)
    calls = {(min(1024, max(1, round(draw.lognormvariate(4, 1.2)))), 0): draw.random() for _ in range(400)}
    buckets = plan_buckets(limits, COST, Histogram({Kind.FLAT: calls}, unseen=1e-9), recipes=28)
    firsts, _ = lattices(Kind.FLAT, limits, 28)
    weights = [0.0] * len(firsts)
    for (tokens, _), weight in calls.items():
        weights[next(i for i, value in enumerate(firsts) if value >= tokens)] += weight
    ours = sum(weight * buckets.find(Kind.FLAT, tokens).size[0] for (tokens, _), weight in calls.items())
    best = best_in_one_size(list(firsts), weights, len(buckets.of(Kind.FLAT)))
    assert best <= ours <= 1.05 * best


def test_a_look_up_takes_less_than_five_microseconds() -> None:
    limits = StepLimits(131_072, 256, 8192, 128, 12_000)
    buckets = plan_buckets(limits, COST, assumed_histogram(limits), recipes=256)
    draw = random.Random(1)
    shapes = [(draw.randint(1, 8192), draw.randint(0, 900)) for _ in range(1000)]

    def look_up() -> None:
        for first, second in shapes:
            buckets.find(Kind.PREFILL, first, second)

    # The least of several runs: this machine is shared, and a neighbour only ever adds.
    seconds = min(timeit.repeat(look_up, number=1, repeat=20)) / len(shapes)
    print(f"look-up: {seconds * 1e6:.2f} us")
    assert seconds < 5e-6

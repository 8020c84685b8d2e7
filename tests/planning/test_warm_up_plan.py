"""Warm-up runs the largest first, every bucket once, and that order reserves least memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_engine.planning.cards import CARDS, MIB, Calibration, Card
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.memory.allocator import (
    ALIGNMENT_BYTES,
    SEGMENT_BYTES,
    CachingAllocator,
    OutOfMemory,
    Run,
    ascending,
    warm_up_memory,
)
from hpu_engine.planning.plan import make_plan
from hpu_engine.planning.settle import Specification
from hpu_engine.planning.shapes.buckets import BucketSet
from hpu_engine.planning.shapes.warm_up_plan import WarmUpPlan
from tests.planning.facts import ERNIE_21B, published


def planned(specification: Specification) -> tuple[BucketSet, WarmUpPlan]:
    plan = make_plan(specification)
    assert plan.settled.buckets is not None
    assert plan.warm_up is not None
    return plan.settled.buckets, plan.warm_up


def ernie(card: Card = CARDS["gaudi2"]) -> Specification:
    return Specification(published(ERNIE_21B), card, max_model_len=32_768)


def test_the_order_is_by_estimated_cost_and_has_every_bucket_once() -> None:
    buckets, warm_up = planned(ernie())
    order = warm_up.order
    assert [b.seconds for b in order] == sorted((b.seconds for b in order), reverse=True)
    assert sorted(order, key=str) == sorted(buckets, key=str)
    assert sum(bucket.recipes for bucket in order) == buckets.recipes


def test_without_a_measurement_seconds_are_a_range_and_with_one_a_number() -> None:
    _, warm_up = planned(ernie())
    assert not warm_up.cold.measured
    assert warm_up.cold.low < warm_up.cold.high
    assert warm_up.warm.high < warm_up.cold.high
    measured = Calibration(card="gaudi2", source="a test", compile_seconds=3.0, load_seconds=0.25)
    buckets, warm_up = planned(ernie(measured.apply(CARDS["gaudi2"])))
    assert warm_up.cold.measured
    assert warm_up.cold.low == warm_up.cold.high
    running = warm_up.cold.low - 3.0 * buckets.recipes
    assert warm_up.warm.low == pytest.approx(running + 0.25 * buckets.recipes)


def test_nothing_is_compiled_on_a_cpu() -> None:
    model = published("meta-llama/Llama-3.2-1B")
    _, warm_up = planned(Specification(model, CARDS["cpu"], max_model_len=2048, force_buckets=True))
    assert warm_up.cold == warm_up.warm


def test_without_buckets_there_is_no_warm_up_plan_and_no_picture(tmp_path: Path) -> None:
    from hpu_engine.cli._plan_plot import PlotError, draw_plan

    plan = make_plan(Specification(published("meta-llama/Llama-3.2-1B"), CARDS["cpu"], max_model_len=2048))
    assert plan.warm_up is None
    with pytest.raises(PlotError, match="--force-buckets"):
        draw_plan(plan, tmp_path / "plan.svg")


def runs_of(sizes: list[int], kept: int) -> list[Run]:
    return [Run(f"recipe {size}", size, kept) for size in sizes]


@settings(max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 200 * MIB), min_size=1, max_size=40),
    kept=st.integers(1, 8 * MIB),
    seed=st.integers(0, 99),
)
def test_largest_first_never_reserves_more_than_smallest_first_or_any_other_order(
    sizes: list[int], kept: int, seed: int
) -> None:
    runs = runs_of(sorted(sizes, reverse=True), kept)
    shuffled = runs.copy()
    random.Random(seed).shuffle(shuffled)
    best = warm_up_memory(runs).peak_bytes
    # An order may win by the rounding of one segment; never by more.
    for other in (ascending(runs), shuffled):
        assert best <= warm_up_memory(other).peak_bytes + SEGMENT_BYTES
    # Nothing can do with less than the largest run and what all of them keep.
    assert best >= max(sizes) + kept


def test_ascending_order_reserves_the_sum_and_descending_the_maximum() -> None:
    sizes = [size * 64 * MIB for size in range(1, 21)]
    runs = runs_of(sizes, 1 * MIB)
    up, down = warm_up_memory(ascending(runs)), warm_up_memory(runs[::-1])
    assert up.peak_bytes > 0.85 * sum(sizes)
    assert down.peak_bytes < 1.05 * max(sizes)
    assert up.used_bytes == down.used_bytes == 20 * MIB
    assert up.fragmented_bytes > 5 * down.fragmented_bytes


def test_ascending_order_runs_out_of_memory_where_descending_does_not_and_says_at_which_recipe() -> None:
    runs = runs_of([size * 64 * MIB for size in range(1, 21)], 1 * MIB)
    capacity = 4 << 30
    assert warm_up_memory(runs[::-1], capacity).peak_bytes <= capacity
    with pytest.raises(OutOfMemory, match="recipe ") as caught:
        warm_up_memory(ascending(runs), capacity)
    assert caught.value.reserved + caught.value.wanted > capacity


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * MIB)), max_size=60))
def test_the_allocator_never_hands_out_a_byte_twice_and_loses_none(operations: list[tuple[bool, int]]) -> None:
    allocator = CachingAllocator()
    held: list[tuple[object, int, int]] = []
    for take, size in operations:
        if take or not held:
            segment, offset, length = allocator.allocate(size, "x")
            assert length >= size
            assert length % ALIGNMENT_BYTES == 0
            for other, start, size_there in held:
                assert other is not segment or start + size_there <= offset or offset + length <= start
            held.append((segment, offset, length))
        else:
            allocator.release(held.pop(size % len(held)))  # type: ignore[arg-type]
        assert allocator.used_bytes == sum(length for _, _, length in held)
    for taken in held:
        allocator.release(taken)  # type: ignore[arg-type]
    assert allocator.used_bytes == 0
    assert all(segment.free == [(0, segment.size)] for segment in allocator._segments)


def test_a_plan_shows_what_the_wrong_order_would_reserve() -> None:
    _, warm_up = planned(ernie())
    assert warm_up.ascending_memory.peak_bytes > 3 * warm_up.memory.peak_bytes
    print(f"largest first {warm_up.memory.peak_bytes / MIB:.0f} MiB, "
          f"smallest first {warm_up.ascending_memory.peak_bytes / MIB:.0f} MiB")  # fmt: skip


def test_the_picture_has_both_orders(tmp_path: Path) -> None:
    from hpu_engine.cli._plan_plot import PlotError, draw_plan

    plan = make_plan(Specification(published(ERNIE_21B), CARDS["gaudi2"], Layout(), max_model_len=4096))
    draw_plan(plan, tmp_path / "plan.svg")
    svg = (tmp_path / "plan.svg").read_text()
    assert "smallest first" in svg or "warm-up" in svg
    with pytest.raises(PlotError, match="nowhere"):
        draw_plan(plan, tmp_path / "nowhere" / "plan.png")

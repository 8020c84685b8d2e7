"""The rebuilt generators give the worked lists; their two known gaps are there, and ours are not."""

from __future__ import annotations

import pytest

from hpu_engine.planning.shapes.buckets import plan_buckets
from hpu_engine.planning.shapes.choice import Histogram
from hpu_engine.planning.shapes.limits import Kind, StepLimits
from tests.planning.recipe_comparison import reference_cost
from tests.planning.vllm_gaudi import (
    GENERATORS,
    Lookup,
    Settings,
    exponential,
    exponential_values,
    linear,
    linear_values,
    padded_values,
)

WORKED = Settings(4096, 128, 2048, 128, 3100)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((128, 128, 2048, 11), [128, 256, 384, 512, 768, 896, 1280, 1664, 2048]),
        ((0, 1, 31, 6), [0, 1, 2, 4, 8, 16, 31]),
        ((128, 128, 8192, 13), [128, 256, 384, 512, 768, 1024, 1536, 2048, 2944, 4096, 5888, 8192]),
        ((1, 2, 128, 8), [1, 2, 4, 8, 12, 22, 40, 72, 128]),
        ((1, 128, 4096, 13), [1, 128, 256, 384, 512, 640, 768, 1024, 1408, 1792, 2304, 3072, 4096]),
    ],
)
def test_exponential_values_are_the_worked_ones(arguments: tuple[int, int, int, int], expected: list[int]) -> None:
    assert exponential_values(*arguments) == expected


def test_the_worked_configuration_has_the_worked_grids() -> None:
    buckets = exponential(WORKED)
    assert sorted({q for _, q, _ in buckets if q > 1}) == exponential_values(128, 128, 2048, 11)
    assert sorted({c for _, q, c in buckets if q > 1}) == [0, 1, 2, 4, 8, 16, 31]
    assert sorted({b for b, q, _ in buckets if q == 1}) == [1, 2, 4, 8, 12, 22, 40, 72, 128]


def test_linear_values_are_powers_of_two_then_multiples() -> None:
    assert linear_values(1, 32, 128) == [1, 2, 4, 8, 16, 32, 64, 96, 128]
    assert linear_values(0, 1, 3) == [0, 1, 2, 3]
    assert len({q for _, q, _ in linear(WORKED) if q > 1}) == 16


def test_padding_aware_values_lie_between_the_two_others() -> None:
    values = padded_values(128, 128, 8192, 2048)
    every = linear_values(128, 128, 8192)
    assert set(values) <= set(every)
    assert len(exponential_values(128, 128, 8192, 13)) < len(values) < len(every)
    assert padded_values(128, 128, 8192, 2048, pad_percent=0) == every


def test_a_prompt_between_the_last_value_and_the_model_length_has_no_exponential_bucket_but_one_of_ours() -> None:
    settings = Settings(5000, 64, 8192, 128, 3000)
    lookup = Lookup(settings, exponential(settings))
    lookup.find((1, 4500, 0), prompt=True)
    assert lookup.misses == 1
    limits = StepLimits(5000, 64, 8192, 128, 3000)
    ours = plan_buckets(limits, reference_cost(128), Histogram({}, unseen=1.0), recipes=50)
    assert ours.find(Kind.PREFILL, 4500, 0).size[0] >= 4500
    assert ours.of(Kind.PREFILL)[-1].size == (5000, 40)


def test_the_first_bucket_that_is_large_enough_is_taken_not_the_least_padded() -> None:
    lookup = Lookup(WORKED, [(1, 1, 4096), (2, 1, 128)])
    assert lookup.find((1, 1, 100), prompt=False) == (1, 1, 4096)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_miss_is_rounded_up_within_the_caps(name: str) -> None:
    lookup = Lookup(WORKED, GENERATORS[name](WORKED))
    batch, query, context = lookup.find((200, 1, 5000), prompt=False)
    assert lookup.misses == 1
    assert (batch, query) == (128, 1)
    assert context >= 5000

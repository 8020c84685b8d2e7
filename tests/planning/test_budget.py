"""Settings that contradict each other are listed, each with rule, value and what would be right."""

from __future__ import annotations

import pytest

from hpu_engine.planning.cards import CARDS
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.memory.budget import limit_violations
from hpu_engine.planning.plan import make_plan
from hpu_engine.planning.settle import Specification, settle
from hpu_engine.planning.shapes.limits import StepLimits
from hpu_engine.planning.violations import PlanError
from tests.planning.facts import ERNIE_21B, ERNIE_300B, LLAMA_405B, published

BUDGET = "chunkedPrefill.maxBatchedTokens"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (StepLimits(4096, 64, 2048, 128), []),
        (StepLimits(4096, 64, 64, 128), [(BUDGET, "block-size", (128,))]),
        (StepLimits(4096, 256, 128, 128), [(BUDGET, "sequences", (256,))]),
        (StepLimits(4096, 256, 64, 128), [(BUDGET, "block-size", (256,)), (BUDGET, "sequences", (256,))]),
        (StepLimits(512, 2, 2048, 128), [(BUDGET, "usable", (1024,))]),
        (StepLimits(4096, 64, 2000, 128), [(BUDGET, "block-multiple", (1920, 2048))]),
        (StepLimits(4096, 64, 130, 128), [(BUDGET, "block-multiple", (128, 256))]),
        (StepLimits(200_000, 64, 2048, 128), [("maxModelLen", "range", (131_072,))]),
        (StepLimits(4096, 0, 2048, 128), [("maxNumSeqs", "range", (1,))]),
        (StepLimits(4096, 64, 2048, 0), [("blockSize", "range", (1,))]),
        (StepLimits(4096, 64, 10**9, 128), [(BUDGET, "range", (1 << 20,))]),
    ],
)
def test_each_rule_names_the_value_and_the_nearest_valid_ones(
    limits: StepLimits, expected: list[tuple[str, str, tuple[int, ...]]]
) -> None:
    found = limit_violations(published(ERNIE_21B), limits)
    assert [(v.field, v.rule, v.nearest) for v in found] == expected


@pytest.mark.parametrize("length", [100, 128, 129, 4096, 131_072])
@pytest.mark.parametrize("sequences", [1, 3, 64, 256])
def test_the_nearest_valid_budget_is_valid_and_so_is_the_default(length: int, sequences: int) -> None:
    model = published(ERNIE_21B)
    for budget in (1, 64, 127, 128, 129, 1000, 4096, 100_000, 1 << 20):
        for violation in limit_violations(model, StepLimits(length, sequences, budget, 128)):
            for value in violation.nearest:
                again = limit_violations(model, StepLimits(length, sequences, value, 128))
                assert not [v for v in again if v.rule != "block-size"], (budget, value, again)
    assert settle(Specification(model, CARDS["gaudi2"], max_model_len=length, max_num_seqs=sequences)).fits


def test_a_model_length_beyond_the_cache_names_the_longest_that_fits() -> None:
    model, layout = published(ERNIE_300B), Layout(1, 8, 8)
    plan = make_plan(Specification(model, CARDS["gaudi2"], layout, max_model_len=131_072))
    assert not plan.fits
    (violation,) = plan.settled.violations
    assert (violation.field, violation.rule) == ("maxModelLen", "memory")
    (possible,) = violation.nearest
    assert make_plan(Specification(model, CARDS["gaudi2"], layout, max_model_len=possible)).fits


def test_weights_beyond_the_card_are_said_to_be_that() -> None:
    plan = make_plan(Specification(published(LLAMA_405B), CARDS["gaudi2"], Layout(8), max_model_len=4096))
    assert [violation.field for violation in plan.settled.violations] == ["weights"]


def test_too_many_blocks_are_refused_with_the_number_that_fits() -> None:
    request = Specification(published(ERNIE_21B), CARDS["gaudi2"], max_model_len=4096, num_kv_blocks=1_000_000)
    (violation,) = make_plan(request).settled.violations
    assert violation.field == "numKvBlocks"
    (possible,) = violation.nearest
    assert make_plan(Specification(request.model, request.card, max_model_len=4096, num_kv_blocks=possible)).fits


def test_a_contradiction_is_an_error_and_not_a_plan() -> None:
    with pytest.raises(PlanError, match="nearest valid: 128"):
        make_plan(Specification(published(ERNIE_21B), CARDS["gaudi2"], max_num_batched_tokens=64, max_num_seqs=8))

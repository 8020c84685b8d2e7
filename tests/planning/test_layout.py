"""Layouts that cut evenly are taken, all others refused with the nearest that do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_engine.planning.cards import CARDS
from hpu_engine.planning.layout import Layout, layout_violations, require_valid
from hpu_engine.planning.plan import fits, make_plan
from hpu_engine.planning.recommend import recommend, ways_out
from hpu_engine.planning.report import verdict
from hpu_engine.planning.settle import Specification
from hpu_engine.planning.violations import PlanError
from tests.planning.facts import ERNIE_21B, ERNIE_300B, LLAMA_8B, LLAMA_405B, published


@pytest.mark.parametrize(
    ("name", "layout", "refused"),
    [
        (LLAMA_8B, Layout(3), {("tensor", "heads"): (2, 4), ("tensor", "intermediate"): (2, 4)}),
        (LLAMA_8B, Layout(16), {("tensor", "server"): (8,)}),
        (LLAMA_8B, Layout(2, 2), {("data", "dense"): (1,)}),
        (LLAMA_8B, Layout(2, 1, 2), {("expert", "dense"): (1,)}),
        (LLAMA_8B, Layout(0), {("tensor", "positive"): (1,)}),
        (LLAMA_8B, Layout(8, 1, 1, 4), {("cardsPerPod", "whole-ranks"): (8,)}),
        (LLAMA_8B, Layout(2, 1, 1, 0), {("cardsPerPod", "positive"): (1,)}),
        (ERNIE_21B, Layout(8), {("tensor", "heads"): (4,)}),
        (ERNIE_21B, Layout(2, 2), {("data", "shared-experts"): (1,)}),
        (ERNIE_21B, Layout(2, 2, 3), {("expert", "whole-group"): (4, 1), ("expert", "experts"): (2, 4)}),
        (ERNIE_21B, Layout(1, 12, 12), {("expert", "experts"): (8, 16), ("cardsPerPod", "whole-ranks"): (6,)}),
        (ERNIE_21B, Layout(1, 16, 16, 16), {("cardsPerPod", "server"): (8,)}),
        ("Qwen/Qwen2.5-7B-Instruct", Layout(8), {("tensor", "heads"): (4,)}),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(
    name: str, layout: Layout, refused: dict[tuple[str, str], tuple[int, ...]]
) -> None:
    found = {(v.field, v.rule): v.nearest for v in layout_violations(published(name), layout)}
    for rule, nearest in refused.items():
        assert rule in found, found
        assert found[rule] == nearest
    for (field, _), values in found.items():
        if field != "tensor":
            continue
        for value in values:
            again = layout_violations(published(name), replace(layout, tensor=value, cards_per_pod=None))
            assert not [v for v in again if v.field == "tensor"], value


def test_kv_heads_are_repeated_when_there_are_more_cards_than_heads() -> None:
    model = published("Qwen/Qwen3-235B-A22B")
    assert not layout_violations(model, Layout(8, 1, 8))
    assert Layout(8, 1, 8).kv_heads_per_card(model) == 1


@given(tensor=st.integers(1, 8), data=st.integers(1, 8), expert=st.integers(1, 64))
def test_a_layout_that_is_taken_cuts_everything_evenly(tensor: int, data: int, expert: int) -> None:
    for name in (ERNIE_21B, ERNIE_300B, LLAMA_8B):
        model, layout = published(name), Layout(tensor, data, expert)
        if layout_violations(model, layout):
            continue
        assert model.heads % tensor == 0
        assert model.vocab % tensor == 0
        assert layout.pod_cards * layout.pods == layout.cards
        assert layout.pod_cards % tensor == 0
        if model.moe is not None:
            assert expert in (1, tensor * data)
            assert model.moe.experts % expert == 0


def test_every_violation_is_in_one_error() -> None:
    with pytest.raises(PlanError) as caught:
        require_valid(published(LLAMA_8B), Layout(3, 2, 5))
    assert {violation.field for violation in caught.value.violations} == {"tensor", "data", "expert"}
    assert "nearest valid" in str(caught.value)


def test_a_model_that_fits_one_card_is_replicated_and_a_large_one_is_cut() -> None:
    small = recommend(Specification(published(LLAMA_8B), CARDS["gaudi2"], max_model_len=8192), 8).best
    assert small is not None
    assert (small.layout, small.replicas) == (Layout(1, 1, 1), 8)
    large = recommend(Specification(published(ERNIE_300B), CARDS["gaudi2"], max_model_len=32768), 8)
    assert large.best is not None
    assert large.best.layout.cards == 8
    assert large.best.layout.expert == 8
    assert "tokens/s" in large.reason


def test_where_nothing_fits_the_reason_names_what_would() -> None:
    request = Specification(published(LLAMA_405B), CARDS["gaudi2"], max_model_len=8192)
    nothing = recommend(request, 8)
    assert nothing.best is None
    assert "no layout of 8 gaudi2 cards holds it" in nothing.reason
    ways = ways_out(replace(request, layout=Layout(8)))
    assert "fp8 weights" in ways
    assert "gaudi3" in ways


def test_where_the_pool_is_too_small_a_larger_one_and_a_length_that_it_holds_are_named() -> None:
    request = Specification(published(LLAMA_8B), CARDS["gaudi2"], max_model_len=8192, num_kv_blocks=5)
    assert not fits(request)
    assert set(ways_out(request)) == {"numKvBlocks 64", "maxModelLen 512"}
    assert fits(replace(request, num_kv_blocks=64))
    assert fits(replace(request, max_model_len=512))
    assert "missing" not in verdict(make_plan(request)), "the card has room for more blocks"

"""The router chooses and weighs as transformers' own routers do; the bias never weighs; ties are settled."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV3Config, Ernie4_5_MoeConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from hpu_engine.group.in_process import InProcessGroup, InProcessRank
from hpu_engine.model.moe.router import Router, RoutingRule, select
from hpu_engine.model.moe.routing import NOWHERE, Routing

HIDDEN, EXPERTS, TOKENS = 48, 16, 64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def router(rule: RoutingRule, weight: Tensor, correction: Tensor | None = None) -> Router:
    return Router(rule, partial(F.linear, weight=weight), weight.dtype, correction)


def assert_same_choice(ours: Routing, ids: Tensor, weights: Tensor) -> None:
    """As sets: transformers leaves the order of the chosen open."""
    ours_order, theirs_order = ours.ids.argsort(-1), ids.argsort(-1)
    assert torch.equal(ours.ids.gather(-1, ours_order), ids.gather(-1, theirs_order))
    close = ours.weights.gather(-1, ours_order), weights.to(ours.weights.dtype).gather(-1, theirs_order)
    torch.testing.assert_close(*close, atol=1e-6, rtol=1e-5)


def from_transformers(theirs: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """ids, weights out of whatever the router returns."""
    outputs = [value for value in theirs(x) if value is not None]
    ids = next(value for value in outputs if value.dtype == torch.int64)
    weights = next(value for value in outputs if value.shape == ids.shape and value.is_floating_point())
    return ids, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ernie(dtype: torch.dtype) -> None:
    config = Ernie4_5_MoeConfig(hidden_size=HIDDEN, moe_num_experts=EXPERTS, moe_k=6)
    reference = Ernie4_5_MoeTopKRouter(config)
    with torch.no_grad():
        reference.weight.copy_(random(EXPERTS, HIDDEN) * 0.3)
        reference.moe_statics.e_score_correction_bias.copy_(random(1, EXPERTS, seed=1) * 0.1)
    x = random(TOKENS, HIDDEN, seed=2).to(dtype)
    correction = reference.moe_statics.e_score_correction_bias[0]
    ours = router(RoutingRule(top_k=6, minimum=1e-12), reference.weight.data, correction.data)(x)
    assert ours.weights.dtype == dtype
    ids, weights = from_transformers(reference, x)
    assert_same_choice(ours, ids, weights)


@pytest.mark.parametrize("normalise", [True, False])
def test_mixtral_and_qwen3(normalise: bool) -> None:
    weight, x = random(EXPERTS, HIDDEN) * 0.3, random(TOKENS, HIDDEN, seed=2)
    mixtral = MixtralTopKRouter(MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2))
    qwen3 = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=normalise)
    )
    for reference, rule in (
        (mixtral, RoutingRule(top_k=2)),
        (qwen3, RoutingRule(top_k=4, renormalise=normalise)),
    ):
        with torch.no_grad():
            reference.weight.copy_(weight)
        assert_same_choice(router(rule, weight)(x), *from_transformers(reference, x))


def test_sigmoid_scores_in_groups_are_deepseek_v3s() -> None:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        moe_intermediate_size=8,
        n_shared_experts=1,
    )
    reference = DeepseekV3TopkRouter(config)
    weight, correction = random(EXPERTS, HIDDEN) * 0.3, random(EXPERTS, seed=1) * 0.1
    x = random(TOKENS, HIDDEN, seed=2)
    with torch.no_grad():
        reference.weight.copy_(weight)
        reference.e_score_correction_bias.copy_(correction)
    rule = RoutingRule(top_k=4, scoring="sigmoid", groups=4, top_groups=2, scale=2.5)
    assert_same_choice(router(rule, weight, correction)(x), *from_transformers(reference, x))


RULES = [
    RoutingRule(top_k=2),
    RoutingRule(top_k=6, minimum=1e-12),
    RoutingRule(top_k=4, renormalise=False),
    RoutingRule(top_k=4, scoring="sigmoid", groups=4, top_groups=2, scale=2.5),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ids_are_64_bit_and_weights_have_the_activations_type(rule: RoutingRule, dtype: torch.dtype) -> None:
    routing = select(random(TOKENS, EXPERTS), rule, random(EXPERTS, seed=1), dtype)
    assert (routing.ids.dtype, routing.weights.dtype) == (torch.int64, dtype)
    assert routing.ids.shape == routing.weights.shape == (TOKENS, rule.top_k)


def test_the_bias_selects_and_never_weighs() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 0] = 1.0
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0])
    routing = select(logits, RoutingRule(top_k=2), bias, torch.float32)
    scores = logits.softmax(-1)[0]
    assert routing.ids.tolist() == [[2, 0]]
    expected = torch.tensor([scores[2], scores[0]]) / (scores[2] + scores[0])
    torch.testing.assert_close(routing.weights[0], expected)


def test_a_vanishing_sum_is_bounded_by_the_minimum() -> None:
    logits = torch.full((1, 4), -200.0)
    logits[0, 3] = 200.0
    away_from_the_winner = torch.tensor([9.0, 9.0, 0.0, 0.0])
    routing = select(logits, RoutingRule(top_k=2, minimum=1e-12), away_from_the_winner, torch.float32)
    assert routing.weights.tolist() == [[0.0, 0.0]]


def tied_logits() -> Tensor:
    """Few distinct values, so that most rows have ties at the edge of the selection."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 3, (4 * TOKENS, EXPERTS), generator=generator).float()


@pytest.mark.parametrize("rule", RULES)
def test_equal_scores_go_to_the_lower_expert_whatever_rows_stand_around(rule: RoutingRule) -> None:
    logits = tied_logits()
    together = select(logits, rule, None, torch.float32)
    for row in range(0, len(logits), 7):
        alone = select(logits[row : row + 1], rule, None, torch.float32)
        assert torch.equal(alone.ids[0], together.ids[row])
        assert torch.equal(alone.weights[0], together.weights[row])
    assert select(torch.zeros(1, 8), RoutingRule(top_k=3), None, torch.float32).ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_ids_and_weights_are_those_of_gathered_logits_bit_for_bit(
    rule: RoutingRule, dtype: torch.dtype
) -> None:
    logits = torch.cat((random(2 * TOKENS, EXPERTS), tied_logits()[: 2 * TOKENS]))
    bias = random(EXPERTS, seed=1) * 0.1

    def work(rank: InProcessRank) -> tuple[Routing, Routing]:
        own = logits.chunk(4)[rank.rank]
        chosen = select(own, rule, bias, dtype)
        before = Routing(rank.all_gather(chosen.ids), rank.all_gather(chosen.weights))
        return before, select(rank.all_gather(own), rule, bias, dtype)

    for before, after in InProcessGroup(4).run(work):
        assert torch.equal(before.ids, after.ids)
        assert torch.equal(before.weights, after.weights)


def test_padding_goes_nowhere_weighs_nothing_and_is_no_load() -> None:
    logits, is_real = random(6, EXPERTS), torch.tensor([True, False, True, True, False, True])
    routing = select(logits, RoutingRule(top_k=3), None, torch.float32, is_real)
    assert torch.equal(routing.is_real, is_real)
    assert set(routing.ids[~is_real].flatten().tolist()) == {NOWHERE}
    assert routing.weights[~is_real].abs().sum() == 0
    without = select(logits[is_real], RoutingRule(top_k=3), None, torch.float32)
    assert torch.equal(routing.ids[is_real], without.ids)
    assert torch.equal(routing.load(EXPERTS), without.load(EXPERTS))
    assert int(routing.load(EXPERTS).sum()) == 4 * 3


def test_padding_enters_no_amax() -> None:
    hidden = torch.tensor([[1.0, -2.0], [1e9, 1.0], [0.5, 0.0]])
    routing = select(random(3, EXPERTS), RoutingRule(top_k=1), None, torch.float32, torch.tensor([True, False, True]))
    assert float(routing.amax(hidden)) == 2.0
    nothing = select(random(3, EXPERTS), RoutingRule(top_k=1), None, torch.float32, torch.zeros(3, dtype=torch.bool))
    assert float(nothing.amax(hidden)) == 0.0

"""ERNIE's float8 scales: every name goes where the table says, nothing unknown passes, layout and minimum are exact."""

from __future__ import annotations

import pytest
import torch

from hpu_engine.model.moe.window import ExpertWindow
from hpu_engine.model.weights.activation_scales import (
    aligned,
    match,
    multiplier,
    shared_input_multiplier,
    target_of,
    window_multipliers,
)
from hpu_engine.model.weights.errors import WeightsError
from hpu_engine.model.weights.name_table import SCALE_NAMES, Scale

WHERE = {"name": "ernie.layers.1.mlp.experts.{expert}.down_proj.activation_scale", "source": "model"}


@pytest.mark.parametrize(
    ("name", "parameter", "expert", "stored"),
    [
        ("ernie.layers.3.self_attn.qkv_proj.activation_scale", "layers.3.qkv.act_scale", None, Scale.AMAX),
        ("ernie.layers.3.self_attn.cachek_matmul.activation_scale", "layers.3.cache_k_scale", None, Scale.AMAX),
        ("ernie.layers.3.self_attn.cachev_matmul.activation_scale", "layers.3.cache_v_scale", None, Scale.AMAX),
        ("ernie.layers.3.self_attn.s_matmul.activation_scale", "layers.3.s_scale", None, Scale.AMAX),
        ("ernie.layers.0.mlp.down_proj.activation_scale", "layers.0.down.act_scale", None, Scale.QUOTIENT),
        (
            "ernie.layers.3.mlp.shared_experts.up_gate_proj.activation_scale",
            "layers.3.shared.gate_up.act_scale",
            None,
            Scale.QUOTIENT,
        ),
        (
            "ernie.layers.12.mlp.experts.63.down_proj.activation_scale",
            "layers.12.experts.down.in_scale",
            63,
            Scale.QUOTIENT,
        ),
        (
            "ernie.layers.12.mlp.experts.7.up_gate_proj.activation_scale",
            "layers.12.experts.gate_up.in_scale",
            7,
            Scale.QUOTIENT,
        ),
    ],
)
def test_a_name_goes_to_its_parameter(name: str, parameter: str, expert: int | None, stored: Scale) -> None:
    target = target_of(name, "model")
    assert (target.parameter, target.expert, target.stored) == (parameter, expert, stored)


def test_every_rule_matches_its_own_names_and_no_other() -> None:
    assert len(SCALE_NAMES) == 12
    for row in SCALE_NAMES:
        name = row.tensor.format(layer=4, expert=9)
        assert [other for other in SCALE_NAMES if match(other, name) is not None] == [row]


def test_an_unknown_scale_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(WeightsError, match=r"nearest name is ernie\.layers\.5\.self_attn\.o_proj\.activation_scale"):
        target_of("ernie.layers.5.self_attn.o_porj.activation_scale", "model")


def test_stored_forms_become_multipliers() -> None:
    assert multiplier(12.0, Scale.AMAX, 240.0, **WHERE) == 20.0
    assert multiplier(0.05, Scale.QUOTIENT, 240.0, **WHERE) == 20.0
    assert multiplier(12.0, Scale.AMAX, 448.0, **WHERE) == pytest.approx(448 / 12)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_would_blind_the_model_is_refused(value: float) -> None:
    with pytest.raises(WeightsError, match="cannot be used"):
        multiplier(value, Scale.QUOTIENT, 240.0, **WHERE)


def test_the_shared_input_has_the_minimum_over_all_experts_and_none_may_be_missing() -> None:
    multipliers = {0: 20.0, 1: 4.0, 2: 9.0, 3: 7.0}
    assert shared_input_multiplier(multipliers, 4, **WHERE) == 4.0
    del multipliers[1]
    with pytest.raises(WeightsError, match="missing for expert 1"):
        shared_input_multiplier(multipliers, 4, **WHERE)


def test_a_window_has_its_own_experts_in_order() -> None:
    multipliers = {3: 7.0, 2: 9.0}
    assert window_multipliers(multipliers, ExpertWindow(2, 3), **WHERE).tolist() == [[9.0], [7.0]]
    with pytest.raises(WeightsError, match="missing for expert 4"):
        window_multipliers(multipliers, ExpertWindow(3, 4), **WHERE)


@pytest.mark.parametrize(("dtype", "slots"), [(torch.bfloat16, 64), (torch.float32, 32)])
def test_each_scale_starts_its_own_128_bytes(dtype: torch.dtype, slots: int) -> None:
    scales = torch.tensor([[1.0], [2.0], [3.0]], dtype=dtype)
    laid_out = aligned(scales)
    assert laid_out.shape == (3, 1, slots)
    assert laid_out.stride(0) * laid_out.element_size() == 0x80
    assert torch.equal(laid_out[:, 0, 0], scales[:, 0])
    assert torch.count_nonzero(laid_out) == 3


@pytest.mark.parametrize("shape", [(3,), (3, 2), (1, 3, 1)])
def test_only_a_column_is_laid_out(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match=r"\[experts, 1\]"):
        aligned(torch.ones(shape))

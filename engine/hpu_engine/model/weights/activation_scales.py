"""ERNIE's float8 scales: where each stored one goes, what is held of it, and how the card wants it laid out. Pure.

A checkpoint stores, per linear, the largest magnitude measured at its input (amax), or amax over what float8 holds.
At run time a value is multiplied by 1/scale on its way into float8 and by the scale on its way out. The names, the
stored forms and the alignment are those that PaddlePaddle/FastDeploy reads on Gaudi (its pull request 5855).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from hpu_engine.model.moe.window import ExpertWindow
from hpu_engine.model.weights.errors import WeightsError
from hpu_engine.model.weights.name_table import nearest

ALIGNMENT_BYTES = 0x80


class Stored(StrEnum):
    """What the number in the checkpoint is."""

    AMAX = "amax"
    SCALE = "amax / largest"


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """`pattern` with `{layer}` and `{expert}` becomes `parameter`."""

    pattern: str
    parameter: str
    stored: Stored

    def match(self, name: str) -> dict[str, int] | None:
        """The layer and expert in `name`; None where it is not of this pattern."""
        text = (
            re.escape(self.pattern).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
        )
        found = re.fullmatch(text, name)
        return None if found is None else {key: int(value) for key, value in found.groupdict().items()}


_A = "ernie.layers.{layer}.self_attn."
_M = "ernie.layers.{layer}.mlp."
SCALE_RULES: tuple[ScaleRule, ...] = (
    ScaleRule(_A + "qkv_proj.activation_scale", "layers.{layer}.qkv.act_scale", Stored.AMAX),
    ScaleRule(_A + "o_proj.activation_scale", "layers.{layer}.output.act_scale", Stored.AMAX),
    ScaleRule(_A + "cachek_matmul.activation_scale", "layers.{layer}.cache_k_scale", Stored.AMAX),
    ScaleRule(_A + "cachev_matmul.activation_scale", "layers.{layer}.cache_v_scale", Stored.AMAX),
    ScaleRule(_A + "q_matmul.activation_scale", "layers.{layer}.q_scale", Stored.AMAX),
    ScaleRule(_A + "s_matmul.activation_scale", "layers.{layer}.s_scale", Stored.AMAX),
    ScaleRule(_M + "up_gate_proj.activation_scale", "layers.{layer}.gate_up.act_scale", Stored.SCALE),
    ScaleRule(_M + "down_proj.activation_scale", "layers.{layer}.down.act_scale", Stored.SCALE),
    ScaleRule(
        _M + "shared_experts.up_gate_proj.activation_scale", "layers.{layer}.shared.gate_up.act_scale", Stored.SCALE
    ),
    ScaleRule(_M + "shared_experts.down_proj.activation_scale", "layers.{layer}.shared.down.act_scale", Stored.SCALE),
    ScaleRule(
        _M + "experts.{expert}.up_gate_proj.activation_scale", "layers.{layer}.experts.gate_up.in_scale", Stored.SCALE
    ),
    ScaleRule(_M + "experts.{expert}.down_proj.activation_scale", "layers.{layer}.experts.down.in_scale", Stored.SCALE),
)
"""An expert's up_gate scale is needed on every rank, its down scale only where the expert is."""


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """Where one stored scale goes. `expert` None: not an expert's."""

    rule: ScaleRule
    parameter: str
    layer: int
    expert: int | None


def target_of(name: str, source: str) -> ScaleTarget:
    """Raises WeightsError, with the nearest name there is, for a scale that nothing asks for."""
    for rule in SCALE_RULES:
        found = rule.match(name)
        if found is not None:
            parameter = rule.parameter.format(layer=found["layer"])
            return ScaleTarget(rule, parameter, found["layer"], found.get("expert"))
    numbers = re.findall(r"\d+", name)
    known = [
        rule.pattern.format(layer=numbers[0] if numbers else 0, expert=numbers[1] if len(numbers) > 1 else 0)
        for rule in SCALE_RULES
    ]
    close = nearest(name, known)
    hint = f"; the nearest name is {close}" if close else ""
    raise WeightsError(f"no such activation scale{hint}", path=source, tensor=name)


def multiplier(value: float, stored: Stored, largest: float, *, name: str, source: str) -> float:
    """What activations are multiplied with before they become float8: largest / amax.

    Raises WeightsError for a zero, negative or non-finite value: it would make every activation infinite or nothing.
    """
    if not 0.0 < value < float("inf"):
        raise WeightsError(f"a scale of {value} cannot be used; it has to be above 0", path=source, tensor=name)
    return largest / value if stored is Stored.AMAX else 1.0 / value


def shared_input_multiplier(multipliers: Mapping[int, float], experts: int, *, name: str, source: str) -> float:
    """One multiplier for the input that all experts of a layer share: the smallest has room for the widest range.

    `multipliers` are by expert, of all experts of the model and not only of a rank's window, so that every rank
    quantises alike. Raises WeightsError where one is missing.
    """
    _require(multipliers, range(experts), name, source)
    return min(multipliers[expert] for expert in range(experts))


def window_multipliers(multipliers: Mapping[int, float], window: ExpertWindow, *, name: str, source: str) -> Tensor:
    """[experts here, 1] float32 in the order of the window. Raises WeightsError where one is missing."""
    wanted = range(window.first, window.last + 1)
    _require(multipliers, wanted, name, source)
    return torch.tensor([[multipliers[expert]] for expert in wanted], dtype=torch.float32)


def aligned(scales: Tensor) -> Tensor:
    """[experts, 1] to [experts, 1, slots]: each value at the start of its own 0x80 bytes, zeros behind it."""
    assert scales.shape == (len(scales), 1), f"[experts, 1] is laid out, not {list(scales.shape)}"
    padded = scales.new_zeros(scales.shape[0], 1, ALIGNMENT_BYTES // scales.element_size())
    padded[:, :, 0] = scales
    return padded


def _require(multipliers: Mapping[int, float], wanted: range, name: str, source: str) -> None:
    missing = [expert for expert in wanted if expert not in multipliers]
    if missing:
        raise WeightsError(
            f"missing for expert {missing[0]} ({len(missing)} of {len(wanted)} experts have none)",
            path=source,
            tensor=name,
        )

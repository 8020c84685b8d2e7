"""Rotary position embedding (Su et al. 2021), half-split or interleaved, with the scalings a description may ask for.

Formulas of the scalings are those of transformers' `modeling_rope_utils` for the `rope_type` of the same name.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpu_engine.device.base import HOST, Turn
from hpu_engine.planning.model.description import Rotary, RotaryScaling


class RotaryTable:
    """cos and sin for positions 0..max_len-1, [max_len, head_dim] each, laid out so that one rule rotates both layouts:
    `x * cos + swap(x) * sin`, where swap exchanges the two elements of every pair and the sign is in sin. They are
    computed on the host, in float32 whatever the device has.
    """

    def __init__(self, rotary: Rotary, head_dim: int, max_len: int, dtype: torch.dtype, where: torch.device) -> None:
        self.interleaved = rotary.layout == "interleaved"
        frequencies, amplitude = _frequencies(rotary, head_dim)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32, device=HOST), frequencies)
        cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
        if self.interleaved:
            cos, sin = torch.stack((cos, cos), -1).flatten(1), torch.stack((-sin, sin), -1).flatten(1)
        else:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        self._cos, self._sin = cos.to(where, dtype), sin.to(where, dtype)

    def at(self, positions: Tensor) -> Turn:
        """Of a step's positions [tokens]: gathered once, used by every layer."""
        return Turn(self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1), self.interleaved)


def _frequencies(rotary: Rotary, head_dim: int) -> tuple[Tensor, float]:
    """Angular frequencies [head_dim / 2] float32, and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=HOST) / head_dim
    frequencies = 1.0 / rotary.theta**exponents
    scaling = rotary.scaling
    if scaling is None:
        return frequencies, 1.0
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor, 1.0
        case "llama3":
            return _llama3(frequencies, scaling), 1.0
        case "yarn":
            return _yarn(frequencies, scaling, rotary.theta, head_dim), _yarn_amplitude(scaling)


def _llama3(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between interpolated."""
    low, high = _given(scaling.low_freq_factor), _given(scaling.high_freq_factor)
    turns = _given(scaling.original_max_positions) * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(frequencies: Tensor, scaling: RotaryScaling, theta: float, head_dim: int) -> Tensor:
    """Peng et al. 2023: a ramp over the dimensions between `beta_fast` and `beta_slow` turns."""

    def dimension_of(turns: float) -> float:
        wavelengths = _given(scaling.original_max_positions) / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = dimension_of(_given(scaling.beta_fast)), dimension_of(_given(scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    places = torch.arange(head_dim // 2, dtype=torch.float32, device=HOST)
    ramp = ((places - low) / (high - low)).clamp(0.0, 1.0)
    return ramp * frequencies / scaling.factor + (1 - ramp) * frequencies


def _yarn_amplitude(scaling: RotaryScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def grown(weight: float) -> float:
        return 1.0 if scaling.factor <= 1.0 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return grown(scaling.mscale) / grown(scaling.mscale_all_dim)
    return grown(1.0)


def _given(value: float | None) -> float:
    assert value is not None, "the description fills every field its kind of scaling uses"
    return value

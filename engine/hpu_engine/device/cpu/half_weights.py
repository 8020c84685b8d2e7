"""A linear whose weights are kept in float16 and computed in float32: half the bytes of a product that waits for them.

For processors that multiply no bfloat16. FBGEMM widens float16 weights inside the product (F16C), activations and sums
stay float32. Weights of a bfloat16 checkpoint lose nothing above 2^-17 on the way (eight digits fit in float16's
eleven, and its subnormals reach down to 2^-24); a weight that would lose more than `MOST_LOST` keeps float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_LOST = 2.0**-25
"""Half a step of float16's subnormals: what a bfloat16 weight below 2^-17 may be off by."""

_LARGEST = torch.finfo(torch.float16).max
_ROWS_AT_ONCE = 1024
"""Rows checked at a time, so that a weight of other digits is known after its first ones, and none is copied whole."""


@dataclass(frozen=True, slots=True)
class HalfLinear:
    """`packed` is FBGEMM's own object of weight and bias."""

    packed: Any

    def __call__(self, x: Tensor, /) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)  # type: ignore[no-any-return]


def half_linear(weight: Tensor, bias: Tensor | None) -> HalfLinear | None:
    """The linear of `weight` [out, in] float32, or None where the weight or the processor does not allow it.

    Its results for a row depend in their last bits on how many rows are multiplied together.
    """
    if weight.dtype is not torch.float32 or not fits_half(weight):
        return None
    try:
        return HalfLinear(torch.ops.quantized.linear_prepack_fp16(weight, bias))
    except (RuntimeError, AttributeError):  # a build without FBGEMM, or a processor it does not know
        return None


def fits_half(weight: Tensor) -> bool:
    """Whether float16 holds every element of `weight` to within `MOST_LOST`."""
    return all(_part_fits(part) for part in torch.split(weight, _ROWS_AT_ONCE))


def _part_fits(part: Tensor) -> bool:
    least, most = torch.aminmax(part) if part.numel() else (part.new_zeros(()), part.new_zeros(()))
    if not (least >= -_LARGEST and most <= _LARGEST):  # NaN is neither
        return False
    # No bits below those of bfloat16: the rule, and found in half of the time that trying takes.
    if not part.contiguous().view(torch.int16)[:, ::2].any():
        return True
    return bool(((part - part.half()).abs() <= MOST_LOST).all())

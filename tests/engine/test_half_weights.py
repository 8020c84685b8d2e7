"""Weights in float16 give the float32 product where nothing is lost, and are refused where something would be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hpu_engine.device.cpu.half_weights import MOST_LOST, fits_half, half_linear


def bfloat16_weight(out: int, width: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out * width)
    return (torch.randn(out, width, generator=generator) * spread).bfloat16().float()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "width"), [(96, 64), (960, 576), (33, 1030)])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 16, 33])
def test_the_product_is_that_of_float32(out: int, width: int, rows: int, biased: bool) -> None:
    weight = bfloat16_weight(out, width, 0.05)
    bias = torch.randn(out, generator=torch.Generator().manual_seed(1)) if biased else None
    linear = half_linear(weight, bias)
    if linear is None:
        pytest.skip("this torch has no float16 weights on this processor")
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(linear(x), F.linear(x, weight, bias), atol=3e-5, rtol=1e-5)


def test_small_weights_of_bfloat16_are_off_by_half_a_step_at_most() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    small = every[every.abs() < 65504].unsqueeze(1)
    assert fits_half(small)
    lost = (small - small.half().float()).abs()
    assert float(lost.max()) <= MOST_LOST
    assert float(lost[small.abs() >= 2.0**-17].max()) == 0


@pytest.mark.parametrize("value", [0.1, 1e5, float("inf"), float("nan")])
def test_a_weight_that_half_would_change_keeps_float32(value: float) -> None:
    """A float32 checkpoint's digits, what is beyond float16's range, what is no number; in the last row alone."""
    weight = bfloat16_weight(2000, 8, 1.0)
    assert fits_half(weight)
    weight[-1, -1] = value
    assert not fits_half(weight)
    assert half_linear(weight, None) is None


def test_another_type_is_left_alone() -> None:
    assert half_linear(torch.ones(8, 8, dtype=torch.bfloat16), None) is None

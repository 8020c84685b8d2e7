"""A linear gets the kernel that is fastest over the row counts of a step, and never one that loses its digits."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import Linear
from hpu_engine.device.cpu import linear_kernels
from hpu_engine.device.cpu.device import ROWS_OF_ONE_THREAD, CpuDevice
from hpu_engine.device.cpu.half_weights import fits_half
from hpu_engine.device.cpu.linear_kernels import KERNELS, LinearKernels, PlainLinear, packed


def slower_by(seconds: float, built: list[str], name: str) -> linear_kernels.Kernel:
    def kernel(weight: Tensor, bias: Tensor | None) -> Linear | None:
        def apply(x: Tensor) -> Tensor:
            ends = time.thread_time() + seconds
            while time.thread_time() < ends:
                pass
            return F.linear(x, weight, bias)

        built.append(name)
        return apply

    return kernel


def test_the_fastest_kernel_is_found_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    slow, fast = slower_by(0.02, built, "slow"), slower_by(0.0, built, "fast")
    monkeypatch.setattr(linear_kernels, "KERNELS", (slow, fast))
    kernels = LinearKernels()
    started = time.thread_time()
    kernels.build(torch.randn(64, 32), None)
    assert time.thread_time() - started < 1.5
    assert built[:3] == ["slow", "fast", "fast"]
    kernels.build(torch.randn(64, 32), None)
    assert built[3:] == ["fast"], "a known shape is timed again, or a second layout of a weight is made"


def test_a_weight_whose_digits_a_kernel_loses_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_only(weight: Tensor, bias: Tensor | None) -> Linear | None:
        return PlainLinear(weight.half().float(), bias) if fits_half(weight) else None

    monkeypatch.setattr(linear_kernels, "KERNELS", (half_only, slower_by(0.001, [], "exact")))
    kernels = LinearKernels()
    x, fine, coarse = torch.randn(5, 32), torch.randn(64, 32), torch.randn(64, 32).bfloat16().float()
    kernels.build(coarse, None)
    torch.testing.assert_close(kernels.build(fine, None)(x), F.linear(x, fine), atol=0, rtol=0)
    torch.testing.assert_close(kernels.build(coarse, None)(x), F.linear(x, coarse), atol=0, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("biased", [False, True])
def test_every_kernel_gives_the_product(kernel: linear_kernels.Kernel, biased: bool) -> None:
    weight = torch.randn(70, 48, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    bias = torch.randn(70, generator=torch.Generator().manual_seed(4)) if biased else None
    linear = kernel(weight, bias)
    assert linear is not None, "this build of torch has all of them"
    for rows in (1, 2, 9, 40):
        x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(linear(x), F.linear(x, weight, bias), atol=2e-4, rtol=1e-4)


def test_bfloat16_weights_keep_their_type() -> None:
    weight = torch.randn(48, 32).bfloat16()
    x = torch.randn(3, 32).bfloat16()
    assert LinearKernels().build(weight, None)(x).dtype == torch.bfloat16
    assert packed(torch.zeros(4, 4, dtype=torch.int64), None) is None


def test_few_tokens_are_computed_by_one_thread_and_the_others_are_back_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    for rows in (1, ROWS_OF_ONE_THREAD, ROWS_OF_ONE_THREAD + 1):
        with CpuDevice().working_on(rows):
            pass
        with CpuDevice(exact=True).working_on(rows):
            pass
    assert set_to == [1, 2, 1, 2]


@pytest.mark.parametrize(("alone", "together"), [(0.004, 0.0), (0.0, 0.004)])
def test_a_linear_calls_all_threads_for_few_tokens_where_that_was_seen_to_pay(
    monkeypatch: pytest.MonkeyPatch, alone: float, together: float
) -> None:
    threads = [2]
    used: list[int] = []

    def kernel(weight: Tensor, bias: Tensor | None) -> Linear:
        def apply(x: Tensor) -> Tensor:
            used.append(threads[0])
            time.sleep(alone if threads[0] == 1 else together)
            return F.linear(x, weight, bias)

        return apply

    monkeypatch.setattr(linear_kernels, "KERNELS", (kernel,))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.__setitem__(0, count))
    linear = LinearKernels().build(torch.randn(64, 32), None)
    assert threads == [2]
    with CpuDevice().working_on(1):
        linear(torch.randn(1, 32))
        assert threads == [1]
    assert used[-1] == (2 if together < alone else 1)

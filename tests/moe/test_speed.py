"""The loop over experts is what to use on a CPU: a grouped product over all of them is not faster than it.

CPU time of one thread, both in turns and the best of each, over weights of several layers so that none stays cached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import ExpertKernel
from hpu_engine.device.cpu.expert_kernels import Expert, sorted_kernel
from hpu_engine.device.cpu.half_weights import half_linear
from hpu_engine.model.moe.router import RoutingRule, select
from hpu_engine.model.moe.routing import Routing

LAYERS, REPEATS = 2, 5


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 8, 32, 256])
@pytest.mark.parametrize(("experts", "top_k", "hidden", "width"), [(4, 2, 576, 1536), (64, 6, 576, 192)])
def test_the_loop_keeps_up_with_a_grouped_product(experts: int, top_k: int, hidden: int, width: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        drawn: Tensor = torch.randn(shape, generator=generator) * float(shape[-1]) ** -0.5
        return drawn.bfloat16().float()

    gate_up = [weight(experts, 2 * width, hidden) for _ in range(LAYERS)]
    down = [weight(experts, hidden, width) for _ in range(LAYERS)]
    layers = list(zip(gate_up, down, strict=True))
    x = torch.randn(rows, hidden, generator=generator)
    routing = select(torch.randn(rows, experts, generator=generator), RoutingRule(top_k), None, torch.float32)

    loops = [sorted_kernel([_plain(*pair) for pair in zip(*layer, strict=True)]) for layer in layers]
    halves = [sorted_kernel([_half(*pair) for pair in zip(*layer, strict=True)]) for layer in layers]
    groups = [partial(_grouped, *layer) for layer in layers]
    expected = groups[0](x, routing.ids, routing.weights)
    torch.testing.assert_close(loops[0](x, routing.ids, routing.weights), expected, atol=1e-5, rtol=1e-5)
    loop, half, grouped = _best([partial(_run_all, kernels, x, routing) for kernels in (loops, halves, groups)])
    print(
        f"{experts} experts, {rows} rows: grouped is {grouped / loop:.2f} of the loop, {grouped / half:.2f} of float16"
    )
    # Two that are alike differ by a third on a busy machine; what is asked is that the loop is not the wrong choice.
    assert min(loop, half) <= 2 * grouped


def _run_all(kernels: Sequence[ExpertKernel], x: Tensor, routing: Routing) -> None:
    for run in kernels:
        run(x, routing.ids, routing.weights)


def _plain(gate_up: Tensor, down: Tensor) -> Expert:
    return partial(F.linear, weight=gate_up), partial(F.linear, weight=down)


def _half(gate_up: Tensor, down: Tensor) -> Expert:
    plain = _plain(gate_up, down)
    return half_linear(gate_up, None) or plain[0], half_linear(down, None) or plain[1]


def _grouped(gate_up: Tensor, down: Tensor, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The same sum by two grouped products."""
    order = ids.flatten().sort(stable=True).indices
    ends = torch.bincount(ids.flatten(), minlength=len(down)).cumsum(0).to(torch.int32)
    row_of = order // ids.shape[1]
    gate, up = F.grouped_mm(hidden[row_of], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    results = F.grouped_mm(F.silu(gate).mul_(up), down.transpose(1, 2), offs=ends)
    return torch.zeros_like(hidden).index_add_(0, row_of, results.mul_(weights.take(order).unsqueeze(1)))


def _best(candidates: list[Callable[[], object]]) -> list[float]:
    best = [float("inf")] * len(candidates)
    for _ in range(REPEATS):
        for index, run in enumerate(candidates):
            started = time.thread_time()
            run()
            best[index] = min(best[index], time.thread_time() - started)
    return best

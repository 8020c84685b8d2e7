"""Gated MLPs on AMX tiles, dense ones and experts: what their parts compute, and every row alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import ExpertKernel, Linear
from hpu_engine.device.cpu.expert_kernels import sorted_kernel
from hpu_engine.device.cpu.native.ops import NativeOps
from hpu_engine.device.cpu.native.tile_ops import TileOps
from tests.engine.test_tile_ops import random, rounded

EXPERTS, TOP_K = 5, 3


def weights(hidden: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """gate_up [2 * width, hidden] and down [hidden, width], of digits that bfloat16 has."""
    return tuple(
        (random(*shape, seed=seed + number) * 0.1).bfloat16().float()
        for number, shape in enumerate(((2 * width, hidden), (hidden, width)))
    )  # type: ignore[return-value]


def linears(ops: NativeOps, gate_up: Tensor, down: Tensor) -> tuple[Linear, Linear]:
    return ops.linear(gate_up, None), ops.linear(down, None)


def textbook(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rounded(x) @ gate_up.double().T).chunk(2, -1)
    return rounded(F.silu(gate) * up) @ down.double().T


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("hidden", "width"), [(576, 1536), (64, 32), (70, 96)])
def test_an_mlp_is_its_parts_and_treats_all_row_counts_alike(tile_ops: TileOps, hidden: int, width: int) -> None:
    gate_up, down = weights(hidden, width)
    mlp, x = tile_ops.mlp(*linears(tile_ops, gate_up, down)), random(211, hidden, seed=2)
    assert mlp is not None
    whole, expected = mlp(x), textbook(x, gate_up, down)
    # A sum just beside the middle of two values of bfloat16 is rounded to the other one.
    off, size = (whole.double() - expected).abs(), expected.abs().mean()
    assert off.max() < 0.02 * size
    assert off.mean() < 5e-4 * size
    for count in (0, 1, 15, 16, 17, 32, 33, 48, 210):
        assert torch.equal(mlp(x[:count]), whole[:count]), count
    assert torch.equal(mlp(x[100:101]), whole[100:101])


def test_gates_of_every_magnitude_give_what_torch_gives(tile_ops: TileOps) -> None:
    """Through an identity on the way in and out."""
    eye = torch.eye(32)
    mlp = tile_ops.mlp(*linears(tile_ops, torch.cat((eye, eye)), eye))
    assert mlp is not None
    x = torch.tensor([0.0, 1e-30, 1e-3, 0.5, 1.0, 5.0, 40.0, 88.0, 89.0, 130.0, 1e4, 1e18]).bfloat16().float()
    x = torch.cat((x, -x, torch.zeros(8))).view(1, 32)
    torch.testing.assert_close(mlp(x), (F.silu(x) * x).bfloat16().float(), rtol=0.01, atol=1e-30)


def test_what_is_not_a_pair_of_plain_linears_on_tiles_is_left_to_its_parts(tile_ops: TileOps) -> None:
    gate_up, down = weights(64, 32)
    fit = linears(tile_ops, gate_up, down)
    biased = tile_ops.linear(down, torch.ones(64))
    precise = tile_ops.linear(down + 1e-4 * random(64, 32, seed=9), None)
    narrow = linears(tile_ops, *weights(64, 24))
    assert tile_ops.mlp(*fit) is not None
    assert tile_ops.experts([fit]) is not None
    for pair in ((fit[0], biased), (fit[0], precise), narrow, (fit[1], fit[0]), (fit[0], lambda x: x)):
        assert tile_ops.mlp(*pair) is None
        assert tile_ops.experts([fit, pair]) is None
    assert tile_ops.experts([]) is None
    larger = linears(tile_ops, *weights(64, 64))
    assert tile_ops.mlp(*larger) is not None
    assert tile_ops.experts([fit, larger]) is None, "one call takes one shape"


def test_other_types_and_strides_give_what_plain_ones_do(tile_ops: TileOps) -> None:
    gate_up, down = weights(64, 96)
    plain = linears(tile_ops, gate_up, down)
    strided = linears(tile_ops, gate_up.T.contiguous().T, down.T.contiguous().T)
    x, (ids, share) = random(20, 64, seed=5).bfloat16(), routed(20)
    for one, other in zip(plain, strided, strict=True):
        wide = random(20, 64 if one is plain[0] else 96, seed=6).bfloat16()
        assert torch.equal(one(wide), other(wide.float()))
    mlps, kernels = (
        [tile_ops.mlp(*pair) for pair in (plain, strided)],
        [tile_ops.experts([pair] * 5) for pair in (plain, strided)],
    )
    assert mlps[0] is not None
    assert mlps[1] is not None
    assert torch.equal(mlps[0](x), mlps[1](x.float()))
    assert kernels[0] is not None
    assert kernels[1] is not None
    assert torch.equal(kernels[0](x, ids, share), kernels[1](x.float(), ids.int(), share.double()))


def experts_of(ops: TileOps, hidden: int = 64, width: int = 96) -> tuple[ExpertKernel, ExpertKernel]:
    """One kernel for all, and the loop over the MLPs of each."""
    pairs = [linears(ops, *weights(hidden, width, seed=10 * number)) for number in range(EXPERTS)]
    kernel, mlps = ops.experts(pairs), [ops.mlp(*pair) for pair in pairs]
    assert kernel is not None
    # The gate is inside of the first half.
    halves = [(mlp, lambda x: x) for mlp in mlps if mlp is not None]
    return kernel, sorted_kernel(halves, lambda x: x)


def routed(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Different experts for each row, one below and one above those that are here among them."""
    order = torch.rand(rows, EXPERTS + 2, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[:, :TOP_K] - 1, random(rows, TOP_K, seed=seed + 1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 2, 31, 200])
def test_experts_are_the_sum_over_their_mlps(tile_ops: TileOps, rows: int) -> None:
    kernel, loop = experts_of(tile_ops)
    x, (ids, share) = random(rows, 64, seed=5), routed(rows)
    torch.testing.assert_close(kernel(x, ids, share), loop(x, ids, share), atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_among_any_others_and_in_any_order_of_its_experts(tile_ops: TileOps) -> None:
    kernel, _ = experts_of(tile_ops)
    x, (ids, share) = random(150, 64, seed=5), routed(150)
    whole = kernel(x, ids, share)
    for own in (slice(0, 1), slice(70, 71), slice(10, 60), slice(149, 150)):
        assert torch.equal(kernel(x[own], ids[own], share[own]), whole[own])
    assert torch.equal(kernel(x, ids.flip(1), share.flip(1)), whole)


def test_rows_of_nobody_here_are_zero_and_a_broken_row_stays_alone(tile_ops: TileOps) -> None:
    kernel, _ = experts_of(tile_ops)
    x, (ids, share) = random(40, 64, seed=5), routed(40)
    whole = kernel(x, ids, share)
    ids[7], x[9] = torch.tensor([-1, EXPERTS, 1 << 40]), float("nan")
    found = kernel(x, ids, share)
    assert (found[7] == 0).all()
    assert found[9].isnan().all()
    others = [row for row in range(40) if row not in (7, 9)]
    assert torch.equal(found[others], whole[others])
    assert kernel(x[:0], ids[:0], share[:0]).shape == (0, 64)

"""What a layer does besides its linears, by torch's operators, and what attention on this device is made of.

All work row by row, so that a row's bits depend on that row alone.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import Gate, HeadNorms, LayerOps, Linear, Turn
from hpu_engine.device.cpu.expert_kernels import silu_mul
from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.device.cpu.single_attention import single_rows


class Singles(Protocol):
    """Attention of the rows with one new token, prepared for one step."""

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        """`q` [rows, kv_heads, group, head_dim], scaled; the same shape back."""


class ChunkAttention(Protocol):
    """Attention of one row with several new tokens, prepared for one step."""

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        """`q` [new tokens, heads, head_dim] of the row to [new tokens, heads * head_dim]."""


class CpuOps(LayerOps, Protocol):
    """What this device's attention is made of, beside what every device does in a layer."""

    def begin(self, cache: LayerPages, pages: Tensor) -> None:
        """Makes `pages` [count], which get their first token in this step, fit for this attention to read."""

    def write(self, cache: LayerPages, slot_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores `keys` and `values` [tokens, kv_heads, head_dim] in the rows of `LayerPages.slot_rows`."""

    def singles(self, tables: Tensor, lens: Tensor, cache: LayerPages, group: int) -> Singles:
        """`tables` [rows, width] padded with scratch, `lens` [rows]: visible tokens."""

    def chunk(self, blocks: Tensor, context_len: int, new_len: int, scale: float) -> ChunkAttention | None:
        """`blocks` hold the row's context and its new tokens. None: torch's fused kernel does it."""


class TorchOps:
    def __init__(self, gate: Gate = silu_mul) -> None:
        self._gate = gate

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        # What is added up layer by layer is kept in float32: the norm needs it so, and no digit of the sum is lost.
        total = x.float() if delta is None else x + delta
        return total, _rms_norm(total, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up)

    def rotate(self, qkv: Tensor, heads: int, norms: HeadNorms | None, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        turned = heads + (qkv.shape[1] - heads) // 2
        qk, values = qkv[:, :turned], qkv[:, turned:]
        if norms is not None:
            parts = ((qk[:, :heads], norms.q), (qk[:, heads:], norms.k))
            qk = torch.cat([_rms_norm(part.float(), weight, norms.eps) for part, weight in parts], 1)
        qk = turned_by(qk, turn)
        return qk[:, :heads], qk[:, heads:], values

    def begin(self, cache: LayerPages, pages: Tensor) -> None:
        cache.clear(pages)

    def write(self, cache: LayerPages, slot_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        cache.write(slot_rows, keys, values)

    def singles(self, tables: Tensor, lens: Tensor, cache: LayerPages, group: int) -> Singles:
        return single_rows(tables, lens, cache, group)

    def chunk(self, blocks: Tensor, context_len: int, new_len: int, scale: float) -> None:
        return None

    def mlp(self, gate_up: Linear, down: Linear) -> None:
        return None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., width] float32 to the type of `weight`, by half of the operators that `F.rms_norm` is composed of where
    the two types differ.
    """
    if weight.dtype is torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight).to(weight.dtype)


def turned_by(x: Tensor, turn: Turn) -> Tensor:
    """`x` [tokens, heads, head_dim], its pairs turned."""
    turned = x * turn.cos
    if turn.interleaved:
        return turned.addcmul_(x.view(*x.shape[:-1], -1, 2).flip(-1).view(x.shape), turn.sin)
    # Halves are swapped where they lie: a swapped copy of `x` would cost as much as the rest.
    half = x.shape[-1] // 2
    turned[..., :half].addcmul_(x[..., half:], turn.sin[..., :half])
    turned[..., half:].addcmul_(x[..., :half], turn.sin[..., half:])
    return turned


@cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)


TORCH_OPS = TorchOps()

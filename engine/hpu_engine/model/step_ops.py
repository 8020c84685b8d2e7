"""What a layer does besides its linears and chunks: one seam, torch's operators behind it or a device's own kernels.

All work row by row, so that a row's bits depend on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import Gate, Linear
from hpu_engine.device.cpu.expert_kernels import silu_mul
from hpu_engine.model.kv_cache import LayerCache
from hpu_engine.model.rotary import rotate
from hpu_engine.model.single_attention import single_rows


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms of queries and keys, where a family has them."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Turn:
    """cos and sin [tokens, 1, head_dim] of a step's positions, and how the pairs of a head lie."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


class Singles(Protocol):
    """Attention of the rows with one new token, prepared for one step."""

    def attend(self, q: Tensor, cache: LayerCache) -> Tensor:
        """`q` [rows, kv_heads, group, head_dim], scaled; the same shape back."""


class ChunkAttention(Protocol):
    """Attention of one row with several new tokens, prepared for one step."""

    def attend(self, q: Tensor, cache: LayerCache) -> Tensor:
        """`q` [new tokens, heads, head_dim] of the row to [new tokens, heads * head_dim]."""


class StepOps(Protocol):
    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`x` + `delta` [rows, width] (`x` itself without one), and its root mean square norm times `weight` in the
        type of `weight`. The sum may be kept in a wider type.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * width], gate first, to silu(gate) * up [rows, width]."""

    def rotate(self, qkv: Tensor, heads: int, norms: HeadNorms | None, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """`qkv` [tokens, heads + 2 * kv_heads, head_dim] to queries and keys, normed and turned, and values."""

    def begin(self, cache: LayerCache, pages: Tensor) -> None:
        """Makes `pages` [count], which get their first token in this step, fit for this attention to read."""

    def write(self, cache: LayerCache, slot_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores `keys` and `values` [tokens, kv_heads, head_dim] in the rows of `LayerCache.slot_rows`."""

    def singles(self, tables: Tensor, lens: Tensor, cache: LayerCache, group: int) -> Singles:
        """`tables` [rows, width] padded with scratch, `lens` [rows]: visible tokens."""

    def chunk(self, blocks: Tensor, context_len: int, new_len: int, scale: float) -> ChunkAttention | None:
        """`blocks` hold the row's context and its new tokens. None: torch's fused kernel does it."""

    def mlp(self, gate_up: Linear, down: Linear) -> Linear | None:
        """A gated MLP of two of the device's linears as one kernel. None: it is done by its parts."""


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
        qk = rotate(qk, turn.cos, turn.sin, interleaved=turn.interleaved)
        return qk[:, :heads], qk[:, heads:], values

    def begin(self, cache: LayerCache, pages: Tensor) -> None:
        cache.clear(pages)

    def write(self, cache: LayerCache, slot_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        cache.write(slot_rows, keys, values)

    def singles(self, tables: Tensor, lens: Tensor, cache: LayerCache, group: int) -> Singles:
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


@cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)


TORCH_OPS = TorchOps()

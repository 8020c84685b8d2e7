"""The one decoder-only transformer: pre-norm blocks of attention and MLP, described entirely by data.

Families differ in their description and their weights, never in a branch here. Linears come from the device, which
chooses their kernels; an MLP is whatever maps [tokens, hidden] to [tokens, hidden] (dense here, experts elsewhere).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.core.batch import Batch
from hpu_engine.core.padded_batch import PaddedBatch
from hpu_engine.device.base import Linear
from hpu_engine.model.attention import AttentionShape, AttentionStep, ExactAttention
from hpu_engine.model.kv_cache import LayerCache
from hpu_engine.model.padded_attention import PaddedAttentionStep
from hpu_engine.model.rotary import RotaryTable
from hpu_engine.planning.model import ModelDescription


class Mlp(Protocol):
    def __call__(self, x: Tensor, is_real: Tensor | None = None) -> Tensor:
        """[tokens, hidden] to the same; what comes of rows where `is_real` [tokens] is False does not matter, but they
        must meet no expert."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """silu(gate) * up, then down. `gate_up` gives both halves side by side."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor, is_real: Tensor | None = None) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class Layer:
    """Norm weights [hidden]; `q_norm`, `k_norm` [head_dim] where the family has them; `qkv` stacks q, k and v."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """What every layer of one step shares."""

    attention: AttentionStep | PaddedAttentionStep
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Transformer:
    """`attention_shape` is that of this rank's heads; everything is computed in `dtype`."""

    description: ModelDescription
    attention_shape: AttentionShape
    dtype: torch.dtype
    embedding: Callable[[Tensor], Tensor]
    layers: Sequence[Layer]
    final_norm: Tensor
    lm_head: Linear
    rotary: RotaryTable
    exact: ExactAttention | None = None

    def hidden(self, batch: Batch | PaddedBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Runs the layers, writing the batch's keys and values; [tokens, hidden] before the final norm."""
        x = self.embedding(batch.token_ids)
        cos, sin = self.rotary.at(batch.positions)
        is_real = batch.is_real if isinstance(batch, PaddedBatch) else None
        step = _StepInputs(self.attention(batch, caches[0]), cos, sin)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + self._attention(layer, cache, x, step)
            x = x + layer.mlp(self._norm(x, layer.mlp_norm), is_real)
        return x

    def attention(self, batch: Batch | PaddedBatch, cache: LayerCache) -> AttentionStep | PaddedAttentionStep:
        """The attention of one step, for each layer in turn; `cache` is of any layer."""
        if isinstance(batch, PaddedBatch):
            return PaddedAttentionStep(self.attention_shape, batch, cache, self.dtype, self.exact)
        return AttentionStep(self.attention_shape, batch, cache, self.dtype, self.exact)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] of `hidden` to [rows, vocab] float32."""
        return self.lm_head(self._norm(hidden, self.final_norm)).float()

    def _attention(self, layer: Layer, cache: LayerCache, x: Tensor, step: _StepInputs) -> Tensor:
        shape = self.attention_shape
        qkv = layer.qkv(self._norm(x, layer.attention_norm)).view(x.shape[0], -1, shape.head_dim)
        qk, values = qkv[:, : shape.heads + shape.kv_heads], qkv[:, shape.heads + shape.kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat(
                (self._norm(qk[:, : shape.heads], layer.q_norm), self._norm(qk[:, shape.heads :], layer.k_norm)), 1
            )
        qk = self.rotary.rotate(qk, step.cos, step.sin)
        step.attention.write(cache, qk[:, shape.heads :], values)
        return layer.output(step.attention.attend(qk[:, : shape.heads], cache))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.description.rms_norm_eps)

"""The one decoder-only transformer: pre-norm blocks of attention and MLP, described entirely by data.

Families differ in their description and their weights, never in a branch here. Linears come from the device, which
chooses their kernels; an MLP is whatever maps [tokens, hidden] to [tokens, hidden] (dense here, experts elsewhere).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpu_engine.device.base import Linear
from hpu_engine.model.attention import AttentionShape, AttentionStep, ExactAttention
from hpu_engine.model.kv_cache import LayerCache
from hpu_engine.model.padded_attention import PaddedAttentionStep
from hpu_engine.model.rotary import RotaryTable
from hpu_engine.model.step_ops import TORCH_OPS, HeadNorms, StepOps, Turn
from hpu_engine.planning.model.description import ModelDescription
from hpu_engine.step.batch import Batch
from hpu_engine.step.padded_batch import PaddedBatch


class Mlp(Protocol):
    def __call__(self, x: Tensor, is_real: Tensor | None = None) -> Tensor:
        """[tokens, hidden] to the same; what comes of rows where `is_real` [tokens] is False does not matter, but they
        must meet no expert."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """silu(gate) * up, then down. `gate_up` gives both halves side by side."""

    gate_up: Linear
    down: Linear
    ops: StepOps = TORCH_OPS

    def __call__(self, x: Tensor, is_real: Tensor | None = None) -> Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class FusedMlp:
    """The same by one kernel of the device."""

    run: Linear

    def __call__(self, x: Tensor, is_real: Tensor | None = None) -> Tensor:
        return self.run(x)


@dataclass(frozen=True, slots=True)
class Layer:
    """Norm weights [hidden]; `qkv` stacks q, k and v."""

    attention_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    output: Linear
    mlp_norm: Tensor
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """What every layer of one step shares."""

    attention: AttentionStep | PaddedAttentionStep
    turn: Turn


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
    ops: StepOps = TORCH_OPS
    exact: ExactAttention | None = None

    def hidden(self, batch: Batch | PaddedBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Runs the layers, writing the batch's keys and values; [tokens, hidden] before the final norm."""
        x = self.embedding(batch.token_ids)
        cos, sin = self.rotary.at(batch.positions)
        is_real = batch.is_real if isinstance(batch, PaddedBatch) else None
        step = _StepInputs(self.attention(batch, caches[0]), Turn(cos, sin, self.rotary.interleaved))
        delta: Tensor | None = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, normed = self._add_norm(x, delta, layer.attention_norm)
            x, normed = self._add_norm(x, self._attention(layer, cache, normed, step), layer.mlp_norm)
            delta = layer.mlp(normed, is_real)
        return x if delta is None else x + delta

    def attention(self, batch: Batch | PaddedBatch, cache: LayerCache) -> AttentionStep | PaddedAttentionStep:
        """The attention of one step, for each layer in turn; `cache` is of any layer."""
        if isinstance(batch, PaddedBatch):
            return PaddedAttentionStep(self.attention_shape, batch, cache, self.dtype, self.exact)
        return AttentionStep(self.attention_shape, batch, cache, self.dtype, self.exact, ops=self.ops)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] of `hidden` to [rows, vocab] float32."""
        return self.lm_head(self._add_norm(hidden, None, self.final_norm)[1]).float()

    def _attention(self, layer: Layer, cache: LayerCache, normed: Tensor, step: _StepInputs) -> Tensor:
        shape = self.attention_shape
        qkv = layer.qkv(normed).view(normed.shape[0], -1, shape.head_dim)
        q, keys, values = self.ops.rotate(qkv, shape.heads, layer.head_norms, step.turn)
        step.attention.write(cache, keys, values)
        return layer.output(step.attention.attend(q, cache))

    def _add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.add_norm(x, delta, weight, self.description.rms_norm_eps)

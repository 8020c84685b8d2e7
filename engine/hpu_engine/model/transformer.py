"""The one decoder-only transformer: pre-norm blocks of attention and MLP, described entirely by data.

Families differ in their description and their weights, never in a branch here. Linears come from the device, which
chooses their kernels; an MLP is whatever maps [tokens, hidden] to [tokens, hidden] (dense here, experts elsewhere).

A step is cut at attention: what lies between two attentions sees tokens only as rows of one matrix, and is a segment
that a device may compile (`Device.segment`). The first segment embeds, the last one ends before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpu_engine.device.base import AttentionShape, Device, HeadNorms, LayerCache, LayerOps, Linear, Turn
from hpu_engine.model.rotary import RotaryTable
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
    ops: LayerOps

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
class Heads:
    """What a segment hands to attention: queries [tokens, heads, head_dim], keys and values [tokens, kv_heads,
    head_dim], and the sum of all layers so far, `x` [tokens, hidden].
    """

    x: Tensor
    q: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Transformer:
    """`attention_shape` is that of this worker's heads; everything is computed in `dtype`."""

    description: ModelDescription
    attention_shape: AttentionShape
    dtype: torch.dtype
    embedding: Callable[[Tensor], Tensor]
    layers: Sequence[Layer]
    final_norm: Tensor
    lm_head: Linear
    rotary: RotaryTable
    device: Device

    def hidden(self, batch: Batch | PaddedBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Runs the layers, writing the batch's keys and values; [tokens, hidden] before the final norm."""
        attention = self.device.attention(self.attention_shape, batch, caches[0], self.dtype)
        turn = self.rotary.at(batch.positions)
        is_real = batch.is_real if isinstance(batch, PaddedBatch) else None

        def enter(token_ids: Tensor) -> Heads:
            return self._heads(self.layers[0], self.embedding(token_ids), None, turn)

        heads = self.device.segment("embedding to attention 0", enter, batch.token_ids)
        for index, cache in enumerate(caches):
            attention.write(cache, heads.keys, heads.values)
            mix = attention.attend(heads.q, cache)
            if index + 1 == len(self.layers):
                break

            def between(mix: Tensor, x: Tensor, index: int = index) -> Heads:
                x, delta = self._behind_attention(self.layers[index], mix, x, is_real)
                return self._heads(self.layers[index + 1], x, delta, turn)

            heads = self.device.segment(f"attention {index} to {index + 1}", between, mix, heads.x)

        def leave(mix: Tensor, x: Tensor) -> Tensor:
            x, delta = self._behind_attention(self.layers[-1], mix, x, is_real)
            return x + delta

        return self.device.segment(f"attention {len(self.layers) - 1} to the end", leave, mix, heads.x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] of `hidden` to [rows, vocab] float32."""

        def head(hidden: Tensor) -> Tensor:
            return self.lm_head(self._add_norm(hidden, None, self.final_norm)[1]).float()

        return self.device.segment("head", head, hidden)

    def _heads(self, layer: Layer, x: Tensor, delta: Tensor | None, turn: Turn) -> Heads:
        shape = self.attention_shape
        x, normed = self._add_norm(x, delta, layer.attention_norm)
        qkv = layer.qkv(normed).view(normed.shape[0], -1, shape.head_dim)
        return Heads(x, *self.device.ops.rotate(qkv, shape.heads, layer.head_norms, turn))

    def _behind_attention(self, layer: Layer, mix: Tensor, x: Tensor, is_real: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum so far, and what the layer's MLP adds to it."""
        x, normed = self._add_norm(x, layer.output(mix), layer.mlp_norm)
        return x, layer.mlp(normed, is_real)

    def _add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.device.ops.add_norm(x, delta, weight, self.description.rms_norm_eps)

"""Attention over paged KV in one formula: product, softmax in float32, product. For chunks and single tokens alike.

What does not depend on the layer (masks, block lists) is prepared once per step by `AttentionStep`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpu_engine.core.batch import Batch, Chunk
from hpu_engine.model.kv_cache import LayerCache


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`scale` multiplies the scores (1 / sqrt(head_dim))."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


class AttentionStep:
    """Attention of one step's rows. `attend` is called once per layer, after the layer's new KV was written."""

    def __init__(self, shape: AttentionShape, batch: Batch, block_size: int, dtype: torch.dtype) -> None:
        self._shape = shape
        self._batch = batch
        self._chunk_masks = [_chunk_mask(chunk, block_size, dtype) for chunk in batch.chunks]
        self._single_blocks = batch.single_blocks.flatten()
        length = batch.single_blocks.shape[1] * block_size
        visible = torch.arange(length) < batch.single_lens[:, None]
        # [1, singles, 1, length], the same for every KV head and query head
        self._single_mask = _additive(visible, dtype)[None, :, None, :]

    def attend(self, q: Tensor, cache: LayerCache) -> Tensor:
        """`q` [tokens, heads, head_dim] to [tokens, heads * head_dim]."""
        parts = [
            self._chunk(q[chunk.start : chunk.start + chunk.new_len], chunk, mask, cache)
            for chunk, mask in zip(self._batch.chunks, self._chunk_masks, strict=True)
        ]
        singles = self._batch.num_singles
        if singles:
            parts.append(self._singles(q[q.shape[0] - singles :], cache))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunk(self, q: Tensor, chunk: Chunk, mask: Tensor, cache: LayerCache) -> Tensor:
        """q [new, heads, d]; keys [kv_heads, length, d]; the group's heads are stacked along the new tokens."""
        s = self._shape
        keys, values = cache.gather(chunk.blocks)
        grouped = q.view(-1, s.kv_heads, s.group, s.head_dim).permute(1, 2, 0, 3).reshape(s.kv_heads, -1, s.head_dim)
        scores = torch.bmm(grouped, keys.transpose(1, 2)).view(s.kv_heads, s.group, chunk.new_len, -1)
        weights = _softmax(scores, s.scale, mask).view(s.kv_heads, s.group * chunk.new_len, -1)
        mixed = torch.bmm(weights, values).view(s.kv_heads, s.group, chunk.new_len, s.head_dim)
        return mixed.permute(2, 0, 1, 3).reshape(chunk.new_len, -1)

    def _singles(self, q: Tensor, cache: LayerCache) -> Tensor:
        """q [rows, heads, d]; keys [kv_heads * rows, length, d]."""
        s, rows = self._shape, q.shape[0]
        keys, values = cache.gather(self._single_blocks)
        keys, values = (x.view(s.kv_heads * rows, -1, s.head_dim) for x in (keys, values))
        grouped = q.view(rows, s.kv_heads, s.group, s.head_dim).transpose(0, 1).reshape(-1, s.group, s.head_dim)
        scores = torch.bmm(grouped, keys.transpose(1, 2)).view(s.kv_heads, rows, s.group, -1)
        weights = _softmax(scores, s.scale, self._single_mask).view(s.kv_heads * rows, s.group, -1)
        mixed = torch.bmm(weights, values).view(s.kv_heads, rows, s.group, s.head_dim)
        return mixed.transpose(0, 1).reshape(rows, -1)


def _softmax(scores: Tensor, scale: float, mask: Tensor) -> Tensor:
    return torch.softmax(scores * scale + mask, dim=-1, dtype=torch.float32).to(scores.dtype)


def _chunk_mask(chunk: Chunk, block_size: int, dtype: torch.dtype) -> Tensor:
    """[new, length]: a token sees the context, the new tokens before it, and itself."""
    positions = torch.arange(chunk.context_len, chunk.context_len + chunk.new_len)
    return _additive(torch.arange(chunk.blocks.shape[0] * block_size) <= positions[:, None], dtype)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))

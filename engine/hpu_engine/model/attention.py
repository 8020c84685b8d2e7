"""Attention of one step over paged KV: rows with several new tokens (chunks) and rows with one (singles).

The formula is the same for both: per page the products of queries and keys, one softmax in float32 over all pages of a
row, per page the mix of values, and the mixes added in the order of the pages. What does not depend on the layer is
prepared once per step. A chunk may use the library's fused kernel instead, which is faster and rounds differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.core.batch import Batch, Chunk
from hpu_engine.model.kv_cache import LayerCache
from hpu_engine.model.single_attention import SingleRows


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
    """`write` the layer's new keys and values, then `attend`, for each layer in turn."""

    def __init__(
        self, shape: AttentionShape, batch: Batch, cache: LayerCache, dtype: torch.dtype, *, exact: bool = False
    ) -> None:
        self._shape = shape
        self._num_singles = batch.num_singles
        self._slot_rows = cache.slot_rows(batch.slots)
        kind = _PagedChunk if exact else _FusedChunk
        self._chunks = [kind(shape, chunk, cache, dtype) for chunk in batch.chunks]
        self._singles = SingleRows(batch.single_blocks, batch.single_lens, cache, shape.group)

    def write(self, cache: LayerCache, keys: Tensor, values: Tensor) -> None:
        """`keys`, `values` [tokens, kv_heads, head_dim] of the whole batch."""
        cache.write(self._slot_rows, keys, values)

    def attend(self, q: Tensor, cache: LayerCache) -> Tensor:
        """`q` [tokens, heads, head_dim] to [tokens, heads * head_dim]."""
        s = self._shape
        parts = [chunk.attend(q, cache) for chunk in self._chunks]
        if self._num_singles:
            rows = q[q.shape[0] - self._num_singles :].reshape(-1, s.kv_heads, s.group, s.head_dim)
            parts.append(self._singles.attend(rows * s.scale, cache).view(-1, s.heads * s.head_dim))
        if not parts:
            return q.reshape(0, s.heads * s.head_dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _ChunkRow:
    """One row with several new tokens. Query heads of a group are stacked along the new tokens."""

    def __init__(self, shape: AttentionShape, chunk: Chunk, cache: LayerCache, dtype: torch.dtype) -> None:
        self._shape = shape
        self._chunk = chunk
        length = chunk.blocks.shape[0] * cache.block_size
        positions = torch.arange(chunk.context_len, chunk.context_len + chunk.new_len)
        hidden = torch.arange(length) > positions[:, None]
        # [new, length]: a token sees the context, the new tokens before it, and itself.
        self._mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))

    def _queries(self, q: Tensor) -> Tensor:
        """[kv_heads, group, new, head_dim], a view."""
        s, chunk = self._shape, self._chunk
        own = q[chunk.start : chunk.start + chunk.new_len]
        return own.view(chunk.new_len, s.kv_heads, s.group, s.head_dim).permute(1, 2, 0, 3)

    def _flat(self, mixed: Tensor) -> Tensor:
        """[kv_heads, group, new, head_dim] to [new, heads * head_dim]."""
        return mixed.permute(2, 0, 1, 3).reshape(self._chunk.new_len, -1)


class _FusedChunk(_ChunkRow):
    def attend(self, q: Tensor, cache: LayerCache) -> Tensor:
        s, chunk = self._shape, self._chunk
        keys, values = (
            pages.index_select(0, chunk.blocks).transpose(0, 1).reshape(s.kv_heads, 1, -1, s.head_dim)
            for pages in (cache.keys, cache.values)
        )
        shared = (s.kv_heads, s.group, -1, s.head_dim)
        mixed = F.scaled_dot_product_attention(
            self._queries(q), keys.expand(shared), values.expand(shared), attn_mask=self._mask, scale=s.scale
        )
        return self._flat(mixed)


class _PagedChunk(_ChunkRow):
    def attend(self, q: Tensor, cache: LayerCache) -> Tensor:
        s, chunk = self._shape, self._chunk
        grouped = (self._queries(q) * s.scale).reshape(s.kv_heads, -1, s.head_dim)
        blocks = chunk.blocks.tolist()
        scores = torch.cat([torch.bmm(grouped, cache.keys[block].transpose(1, 2)) for block in blocks], dim=-1)
        scores = scores.view(s.kv_heads, s.group, chunk.new_len, -1) + self._mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        per_page = torch.split(weights.view(s.kv_heads, s.group * chunk.new_len, -1), cache.block_size, dim=-1)
        mixed = torch.bmm(per_page[0].contiguous(), cache.values[blocks[0]])
        for block, weight in zip(blocks[1:], per_page[1:], strict=True):
            mixed += torch.bmm(weight.contiguous(), cache.values[block])
        return self._flat(mixed.view(s.kv_heads, s.group, chunk.new_len, s.head_dim))

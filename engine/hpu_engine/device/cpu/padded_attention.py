"""Attention of one step in bucket shapes: no shape here depends on anything but the buckets.

The formulas are those of the attention in own shapes and give the same bits under `ExactAttention`: padding adds pages
behind a row's own, and their weight of 0 changes no sum. For that scratch must hold finite numbers: padding tokens
write zeros there, and nothing else is written there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import AttentionShape
from hpu_engine.device.cpu.attention import ExactAttention
from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.step.padded_batch import PaddedBatch, PaddedChunk, PaddedSingles


class PaddedAttentionStep:
    """`write` the layer's new keys and values, then `attend`, for each layer in turn."""

    def __init__(
        self,
        shape: AttentionShape,
        batch: PaddedBatch,
        cache: LayerPages,
        dtype: torch.dtype,
        exact: ExactAttention | None,
    ) -> None:
        self._new_blocks = batch.new_blocks
        self._slot_rows = cache.slot_rows(batch.slots)
        self._is_padding = ~batch.is_real[:, None, None]
        self._queries = torch.zeros(batch.buffer_rows, shape.heads, shape.head_dim, dtype=dtype)
        self._mixes = torch.zeros(batch.buffer_rows, shape.heads * shape.head_dim, dtype=dtype)
        self._parts: list[_FusedChunk | _SlicedChunk | _Singles] = [
            _SlicedChunk(shape, chunk, cache, exact) if exact else _FusedChunk(shape, chunk, cache, dtype)
            for chunk in batch.chunks
        ]
        padded_group = exact.group_rows if exact else shape.group
        self._parts += [_Singles(shape, singles, cache, padded_group) for singles in batch.singles]

    def write(self, cache: LayerPages, keys: Tensor, values: Tensor) -> None:
        """`keys`, `values` [tokens, kv_heads, head_dim] of the whole batch; padding writes zeros to scratch."""
        cache.clear(self._new_blocks)
        cache.write(self._slot_rows, *(new.masked_fill(self._is_padding, 0.0) for new in (keys, values)))

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        """`q` [tokens, heads, head_dim] to [tokens, heads * head_dim], 0 for padding; valid until the next call."""
        tokens = q.shape[0]
        self._queries[:tokens] = q
        for part in self._parts:
            self._mixes.index_copy_(0, part.rows, part.attend(self._queries.index_select(0, part.rows), cache))
        return self._mixes[:tokens]


class _FusedChunk:
    """One row with several new tokens, by the library's fused kernel."""

    def __init__(self, shape: AttentionShape, chunk: PaddedChunk, cache: LayerPages, dtype: torch.dtype) -> None:
        self.rows = chunk.rows
        self._shape = shape
        self._blocks = chunk.blocks
        hidden = _hidden(chunk.last_visible, chunk.blocks.shape[0] * cache.block_size)
        self._mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        s, count = self._shape, q.shape[0]
        shared = (s.kv_heads, s.group, -1, s.head_dim)
        keys, values = (
            pages.index_select(0, self._blocks).transpose(0, 1).reshape(s.kv_heads, 1, -1, s.head_dim).expand(shared)
            for pages in (cache.keys, cache.values)
        )
        queries = q.view(count, s.kv_heads, s.group, s.head_dim).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask, scale=s.scale)
        return mixed.permute(2, 0, 1, 3).reshape(count, -1)


class _SlicedChunk:
    """One row with several new tokens, some tokens at a time, each slice over all pages."""

    def __init__(self, shape: AttentionShape, chunk: PaddedChunk, cache: LayerPages, exact: ExactAttention) -> None:
        self.rows = chunk.rows
        self._shape = shape
        self._tokens = exact.chunk_tokens
        self._blocks = chunk.blocks
        self._missing = -chunk.rows.shape[0] % self._tokens
        last_visible = F.pad(chunk.last_visible, (0, self._missing))
        length = chunk.blocks.shape[0] * cache.block_size
        self._hidden = [
            _hidden(part, length).repeat(shape.group, 1) for part in torch.split(last_visible, self._tokens)
        ]

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        count = q.shape[0]
        slices = torch.split(F.pad(q * self._shape.scale, (0, 0, 0, 0, 0, self._missing)), self._tokens)
        keys, values = (pages.index_select(0, self._blocks) for pages in (cache.keys, cache.values))
        parts = [self._slice(own, keys, values, hidden) for own, hidden in zip(slices, self._hidden, strict=True)]
        return torch.cat(parts)[:count]

    def _slice(self, q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        s = self._shape
        queries = q.view(-1, s.kv_heads, s.group, s.head_dim).permute(1, 2, 0, 3).reshape(s.kv_heads, -1, s.head_dim)
        scores = torch.cat([torch.bmm(queries, page.transpose(1, 2)) for page in keys], dim=-1)
        weights = torch.softmax(scores.float().masked_fill_(hidden, float("-inf")), dim=-1).to(q.dtype)
        per_page = torch.split(weights, keys.shape[2], dim=-1)
        mixed = torch.bmm(per_page[0].contiguous(), values[0])
        for weight, page in zip(per_page[1:], values[1:], strict=True):
            mixed += torch.bmm(weight.contiguous(), page)
        return mixed.view(s.kv_heads, s.group, -1, s.head_dim).permute(2, 0, 1, 3).reshape(q.shape[0], -1)


class _Singles:
    """All rows with one new token: products page by page, each with its owner's query, the rest row by row."""

    def __init__(self, shape: AttentionShape, singles: PaddedSingles, cache: LayerPages, padded_group: int) -> None:
        self.rows = singles.rows
        self._shape = shape
        self._blocks = singles.blocks
        self._owners = singles.owners
        self._padded_group = padded_group
        width = singles.places.shape[1]
        size, group = cache.block_size, shape.group
        head = torch.arange(shape.heads)
        padded_heads = shape.kv_heads * padded_group
        place_of_head = head // group * padded_group + head % group
        head_at_place = torch.zeros(padded_heads, dtype=torch.int64).index_copy_(0, place_of_head, head)
        self._to_rows = (singles.places[:, None, :] * padded_heads + place_of_head[:, None]).flatten()
        self._to_pages = (
            (self._owners[:, None] * shape.heads + head_at_place) * width + singles.columns[:, None]
        ).flatten()
        self._columns = singles.places.t().contiguous()
        self._hidden = (torch.arange(width * size) >= singles.lens[:, None])[:, None, :]

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        s, rows, size, group = self._shape, q.shape[0], cache.block_size, self._padded_group
        pages = self._blocks.shape[0]
        batch = pages * s.kv_heads
        queries = F.pad((q * s.scale).view(rows, s.kv_heads, s.group, s.head_dim), (0, 0, 0, group - s.group))
        queries = queries.view(rows, -1).index_select(0, self._owners).view(batch, group, s.head_dim)
        keys, values = (
            part.index_select(0, self._blocks).view(batch, size, s.head_dim) for part in (cache.keys, cache.values)
        )
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(-1, size)
        by_row = scores.index_select(0, self._to_rows).view(rows, s.heads, -1).float()
        weights = torch.softmax(by_row.masked_fill_(self._hidden, float("-inf")), dim=-1).to(q.dtype)
        by_page = weights.view(-1, size).index_select(0, self._to_pages).view(batch, group, size)
        mixes = torch.bmm(by_page, values)[:, : s.group].reshape(pages, -1)
        mixes[0] = 0.0  # of scratch: added where a row has no more pages
        total = mixes.index_select(0, self._columns[0])
        for column in self._columns[1:]:
            total += mixes.index_select(0, column)
        return total


def _hidden(last_visible: Tensor, length: int) -> Tensor:
    """[rows, length]: True where a position may not be seen."""
    return torch.arange(length) > last_visible[:, None]

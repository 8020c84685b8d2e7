"""Attention of one step over paged KV: rows with several new tokens (chunks) and rows with one (singles).

The formula is the same for both: per page the products of queries and keys, one softmax in float32 over all pages of a
row, per page the mix of values, and the mixes added in the order of the pages. What does not depend on the layer is
prepared once per step. Chunks use the library's fused kernel instead, which is faster and rounds differently, unless
`ExactAttention` asks for one order of every sum: then chunks run in slices of a fixed number of tokens, so that every
product has one of two shapes, and these two were seen to treat a row alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import AttentionShape
from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.device.cpu.single_attention import SingleRows
from hpu_engine.device.cpu.torch_ops import ChunkAttention, CpuOps, Singles
from hpu_engine.step.batch import Batch, Chunk


@dataclass(frozen=True, slots=True)
class ExactAttention:
    """`chunk_tokens` of a chunk are attended at a time; a single token's query rows are padded to `group_rows`."""

    chunk_tokens: int
    group_rows: int


class AttentionStep:
    """`write` the layer's new keys and values, then `attend`, for each layer in turn."""

    def __init__(
        self,
        shape: AttentionShape,
        batch: Batch,
        cache: LayerPages,
        dtype: torch.dtype,
        exact: ExactAttention | None,
        *,
        ops: CpuOps,
    ) -> None:
        self._shape = shape
        self._ops = ops
        self._num_singles = batch.num_singles
        self._new_blocks = batch.new_blocks
        self._slot_rows = cache.slot_rows(batch.slots)
        self._chunks: list[tuple[slice, ChunkAttention]] = []
        for chunk in batch.chunks:
            attention: ChunkAttention = (
                _SlicedChunk(shape, chunk, cache, exact)
                if exact
                else ops.chunk(chunk.blocks, chunk.context_len, chunk.new_len, shape.scale)
                or _FusedChunk(shape, chunk, cache, dtype)
            )
            self._chunks.append((slice(chunk.start, chunk.start + chunk.new_len), attention))
        tables, lens = batch.single_blocks, batch.single_lens
        self._singles: Singles = (
            SingleRows(tables, lens, cache, shape.group, exact.group_rows)
            if exact
            else ops.singles(tables, lens, cache, shape.group)
        )

    def write(self, cache: LayerPages, keys: Tensor, values: Tensor) -> None:
        """`keys`, `values` [tokens, kv_heads, head_dim] of the whole batch."""
        if self._new_blocks.shape[0]:
            self._ops.begin(cache, self._new_blocks)
        self._ops.write(cache, self._slot_rows, keys, values)

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        """`q` [tokens, heads, head_dim] to [tokens, heads * head_dim]."""
        s = self._shape
        parts = [chunk.attend(q[tokens], cache) for tokens, chunk in self._chunks]
        if self._num_singles:
            rows = q[q.shape[0] - self._num_singles :].reshape(-1, s.kv_heads, s.group, s.head_dim)
            parts.append(self._singles.attend(rows * s.scale, cache).view(-1, s.heads * s.head_dim))
        if not parts:
            return q.reshape(0, s.heads * s.head_dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _FusedChunk:
    """One row with several new tokens, by the library's fused kernel."""

    def __init__(self, shape: AttentionShape, chunk: Chunk, cache: LayerPages, dtype: torch.dtype) -> None:
        self._shape = shape
        self._chunk = chunk
        self._mask = _mask(chunk.context_len, chunk.new_len, chunk.blocks.shape[0] * cache.block_size, dtype)

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        s, chunk = self._shape, self._chunk
        keys, values = (
            pages.index_select(0, chunk.blocks).transpose(0, 1).reshape(s.kv_heads, 1, -1, s.head_dim)
            for pages in (cache.keys, cache.values)
        )
        queries = q.view(chunk.new_len, s.kv_heads, s.group, s.head_dim).permute(1, 2, 0, 3)
        shared = (s.kv_heads, s.group, -1, s.head_dim)
        mixed = F.scaled_dot_product_attention(
            queries, keys.expand(shared), values.expand(shared), attn_mask=self._mask, scale=s.scale
        )
        return mixed.permute(2, 0, 1, 3).reshape(chunk.new_len, -1)


class _SlicedChunk:
    """One row with several new tokens, by the formula of the singles, some tokens at a time (the last ones padded).

    Query heads of a group are stacked along the tokens of a slice.
    """

    def __init__(self, shape: AttentionShape, chunk: Chunk, cache: LayerPages, exact: ExactAttention) -> None:
        self._shape = shape
        self._chunk = chunk
        self._tokens = exact.chunk_tokens
        self._blocks = chunk.blocks.tolist()
        size, end = cache.block_size, chunk.context_len + chunk.new_len
        self._slices = []
        for first in range(chunk.context_len, end, self._tokens):
            pages = -(-min(first + self._tokens, end) // size)
            mask = _mask(first, self._tokens, pages * size, torch.float32)
            self._slices.append((first - chunk.context_len, pages, mask.repeat(shape.group, 1)))

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        chunk = self._chunk
        own = F.pad(q * self._shape.scale, (0, 0, 0, 0, 0, -chunk.new_len % self._tokens))
        parts = [
            self._slice(own[start : start + self._tokens], self._blocks[:pages], mask, cache)
            for start, pages, mask in self._slices
        ]
        return torch.cat(parts)[: chunk.new_len]

    def _slice(self, q: Tensor, blocks: list[int], mask: Tensor, cache: LayerPages) -> Tensor:
        s = self._shape
        queries = q.view(-1, s.kv_heads, s.group, s.head_dim).permute(1, 2, 0, 3).reshape(s.kv_heads, -1, s.head_dim)
        scores = torch.cat([torch.bmm(queries, cache.keys[block].transpose(1, 2)) for block in blocks], dim=-1)
        weights = torch.softmax(scores.float() + mask, dim=-1).to(q.dtype)
        per_page = torch.split(weights, cache.block_size, dim=-1)
        mixed = torch.bmm(per_page[0].contiguous(), cache.values[blocks[0]])
        for block, weight in zip(blocks[1:], per_page[1:], strict=True):
            mixed += torch.bmm(weight.contiguous(), cache.values[block])
        return mixed.view(s.kv_heads, s.group, -1, s.head_dim).permute(2, 0, 1, 3).reshape(q.shape[0], -1)


def _mask(first: int, count: int, length: int, dtype: torch.dtype) -> Tensor:
    """[count, length], additive: the token at position `first` + i sees all positions up to its own."""
    hidden = torch.arange(length) > torch.arange(first, first + count)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))

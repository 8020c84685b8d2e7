"""The KV cache of one worker: per layer pages of keys and of values, heads outside tokens.

A page is one KV block of one layer, `[kv_heads, block_size, head_dim]`; pages lie one behind the other. A run of pages
is therefore one batch of matrices without a copy, and a token is written as one row per head. Page 0 is scratch, and so
are the pages behind those that the pool hands out.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerPages:
    """`keys` and `values` [pages, kv_heads, block_size, head_dim] of one layer."""

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_pages(self) -> int:
        return self.keys.shape[0]

    def slot_rows(self, slots: Tensor) -> Tensor:
        """Where `write` puts each head of each token: [tokens * kv_heads], the same for every layer."""
        _, heads, size, _ = self.keys.shape
        pages, offsets = slots // size, slots % size
        return ((pages[:, None] * heads + torch.arange(heads, device=slots.device)) * size + offsets[:, None]).flatten()

    def clear(self, pages: Tensor) -> None:
        """Zero whole `pages` [count] before their first token is written: what is masked is still multiplied by a
        weight of 0, and a NaN of a page's last owner would come through that.
        """
        self.keys.index_fill_(0, pages, 0.0)
        self.values.index_fill_(0, pages, 0.0)

    def write(self, slot_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store new tokens: `keys`, `values` [tokens, kv_heads, head_dim]."""
        # Put, not copied by row: that would take keys and values of one piece, which they are not.
        rows = (slot_rows.view(keys.shape[:2]),)
        self.keys.view(-1, keys.shape[-1]).index_put_(rows, keys)
        self.values.view(-1, keys.shape[-1]).index_put_(rows, values)


def allocate_kv_cache(
    *, layers: int, pages: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> tuple[LayerPages, ...]:
    """An empty cache of `pages` pages in every layer; memory is taken as pages are first written."""
    shape = (pages, kv_heads, block_size, head_dim)
    return tuple(LayerPages(_lazy_zeros(shape, dtype), _lazy_zeros(shape, dtype)) for _ in range(layers))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written: torch's own are written at once, and so is what an allocator
    has used before. They must be zeros, since a slot that nobody wrote yet is multiplied by a weight of 0.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

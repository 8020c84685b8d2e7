"""The KV cache of one rank: per layer keys and values, head-major pages.

`[kv_heads, slots, head_dim]` with slot = block * block_size + offset: whatever blocks are gathered come out as
`[kv_heads, rows, tokens, head_dim]` without moving heads, so that scores and values are plain batched products.
Block 0 is scratch, so there is one block more than the pool hands out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpu_engine.planning.model import ModelDescription


@dataclass(frozen=True, slots=True)
class LayerCache:
    """`keys` and `values` [kv_heads, slots, head_dim] of one layer."""

    keys: Tensor
    values: Tensor
    block_size: int

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store new tokens: `slots` [tokens]; `keys`, `values` [tokens, kv_heads, head_dim]."""
        self.keys.index_copy_(1, slots, keys.transpose(0, 1))
        self.values.index_copy_(1, slots, values.transpose(0, 1))

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of `blocks` [n]: keys and values [kv_heads, n * block_size, head_dim]."""
        return self._gather(self.keys, blocks), self._gather(self.values, blocks)

    def _gather(self, cache: Tensor, blocks: Tensor) -> Tensor:
        heads, _, head_dim = cache.shape
        pages = cache.view(heads, -1, self.block_size * head_dim)
        return pages.index_select(1, blocks).view(heads, -1, head_dim)


def allocate_kv_cache(
    description: ModelDescription, num_blocks: int, block_size: int, dtype: torch.dtype
) -> tuple[LayerCache, ...]:
    """A cache of `num_blocks` blocks and scratch for every layer, zeroed lazily by the operating system."""
    shape = (description.kv_heads, (num_blocks + 1) * block_size, description.head_dim)
    return tuple(
        LayerCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), block_size)
        for _ in range(description.layers)
    )


def kv_block_bytes(description: ModelDescription, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    per_token = 2 * description.layers * description.kv_heads * description.head_dim * dtype.itemsize
    return per_token * block_size

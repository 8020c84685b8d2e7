"""Does it fit: the memory of one card, line by line, and the number of KV blocks that is left.

visible = runtime reserve + weights + activations of the largest step + graphs + KV cache + free

A card that names no visible memory is as large as what is needed.

Everything but the cache is known first; the largest decode step grows with the number of blocks, so the cache takes
the largest number of blocks for which the sum still holds. Beside the blocks that the scheduler may use,
`StepLimits.scratch_blocks` more are held for padding to write to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpu_engine.planning.cards import Card
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.memory.activations import ActivationPlan, activation_plan
from hpu_engine.planning.memory.weights import (
    KvFormat,
    WeightFormat,
    WeightLine,
    kv_bytes_per_block,
    weight_lines,
)
from hpu_engine.planning.model.description import DType, ModelDescription
from hpu_engine.planning.shapes.limits import StepLimits


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One card. `kv_blocks` are those a scheduler may use; `blocks_needed` hold one request of the model's length."""

    visible_bytes: int | None
    reserve_bytes: int
    weights: tuple[WeightLine, ...]
    activations: ActivationPlan
    graph_bytes: int
    kv_block_bytes: int
    kv_blocks: int
    scratch_blocks: int
    blocks_needed: int
    block_size: int

    @property
    def weight_bytes(self) -> int:
        return sum(line.bytes for line in self.weights)

    @property
    def replicated_bytes(self) -> int:
        return sum(line.replicated_bytes for line in self.weights)

    @property
    def kv_bytes(self) -> int:
        return (self.kv_blocks + self.scratch_blocks) * self.kv_block_bytes if self.kv_blocks else 0

    @property
    def needed_bytes(self) -> int:
        """All lines together."""
        return self.reserve_bytes + self.weight_bytes + self.activations.bytes + self.graph_bytes + self.kv_bytes

    @property
    def free_bytes(self) -> int:
        """What no line uses; negative where the lines exceed the card."""
        return 0 if self.visible_bytes is None else self.visible_bytes - self.needed_bytes

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks * self.block_size

    @property
    def fits(self) -> bool:
        return self.kv_blocks >= self.blocks_needed and self.free_bytes >= 0

    @property
    def shortfall_bytes(self) -> int:
        """Bytes that are missing for one request of the model's length; 0 where it fits."""
        if self.fits:
            return 0
        wanted = (self.blocks_needed + self.scratch_blocks) * self.kv_block_bytes
        return max(0, wanted - self.kv_bytes - self.free_bytes)


def memory_plan(
    model: ModelDescription,
    layout: Layout,
    card: Card,
    limits: StepLimits,
    *,
    dtype: DType,
    weight_format: WeightFormat,
    kv_format: KvFormat,
    recipes: int,
) -> MemoryPlan:
    """The memory of one card. `limits.kv_blocks` None: as many as fit; a number: exactly so many, fitting or not.
    `dtype` is that of activations.

    Graphs take `graph_bytes_per_recipe` where that was measured, else a fraction of what weights and the largest step
    leave (vllm-gaudi reserves the same tenth).
    """
    lines = weight_lines(model, layout, weight_format)
    block = kv_bytes_per_block(model, layout, kv_format, limits.block_size)
    fixed = card.runtime_reserve_bytes + sum(line.bytes for line in lines)

    visible = card.visible_bytes or 0

    def with_blocks(count: int) -> MemoryPlan:
        activations = activation_plan(model, layout, replace(limits, kv_blocks=count), dtype=dtype)
        left = visible - fixed - activations.bytes
        graphs = (
            int(max(0, left) * card.graph_reserve_fraction)
            if card.graph_bytes_per_recipe is None
            else recipes * card.graph_bytes_per_recipe
        )
        return MemoryPlan(
            visible_bytes=card.visible_bytes,
            reserve_bytes=card.runtime_reserve_bytes,
            weights=lines,
            activations=activations,
            graph_bytes=graphs,
            kv_block_bytes=block,
            kv_blocks=count,
            scratch_blocks=limits.scratch_blocks,
            blocks_needed=limits.blocks_per_row,
            block_size=limits.block_size,
        )

    if limits.kv_blocks is not None:
        return with_blocks(limits.kv_blocks)
    low, high = 0, max(0, visible - fixed) // block
    while low < high:
        middle = (low + high + 1) // 2
        if with_blocks(middle).free_bytes >= 0:
            low = middle
        else:
            high = middle - 1
    return with_blocks(low)

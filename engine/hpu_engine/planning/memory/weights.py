"""Bytes that a card holds for the whole life of a rank: weights and KV cache. Exact, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpu_engine.planning.layout import Layout
from hpu_engine.planning.model.description import DType, ModelDescription
from hpu_engine.planning.model.parameters import Cut, Part, TensorRow, tensor_table

WeightFormat = DType | Literal["fp8"]
KvFormat = DType | Literal["fp8"]

ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
WIDE_BYTES = 4
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class WeightLine:
    """One part's weights on one card. `replicated_bytes` of `bytes` are held by another card of the rank as well."""

    part: Part
    bytes: int
    replicated_bytes: int


def weight_lines(model: ModelDescription, layout: Layout, weight_format: WeightFormat) -> tuple[WeightLine, ...]:
    """Weights of one card by part, in the order of the forward pass; parts the model lacks are left out."""
    totals: dict[Part, list[int]] = {}
    for row in tensor_table(model):
        size = local_bytes(model, layout, row, weight_format)
        line = totals.setdefault(row.part, [0, 0])
        line[0] += size
        if layout.is_replicated(row) or _has_repeated_kv_heads(model, layout, row):
            line[1] += size
    return tuple(WeightLine(part, *totals[part]) for part in Part if part in totals)


def weight_bytes(model: ModelDescription, layout: Layout, weight_format: WeightFormat) -> int:
    """Weights of one card."""
    return sum(line.bytes for line in weight_lines(model, layout, weight_format))


def local_bytes(model: ModelDescription, layout: Layout, row: TensorRow, weight_format: WeightFormat) -> int:
    """Bytes of all copies of `row` that one card holds.

    fp8 stores one byte for each element of a projection and one float32 scale for each of its output channels;
    embeddings, head, router, norms and biases stay in bfloat16 or wider.
    """
    shape = layout.local_shape(model, row)
    elements = 1
    for size in shape:
        elements *= size
    copies = layout.local_copies(row)
    if row.wide:
        return copies * elements * WIDE_BYTES
    if weight_format == "fp8":
        one = elements + shape[0] * SCALE_BYTES if row.projection else elements * ITEM_BYTES["bfloat16"]
        return copies * one
    return copies * elements * ITEM_BYTES[weight_format]


def kv_bytes_per_token(model: ModelDescription, layout: Layout, kv_format: KvFormat) -> int:
    """Key and value of one token in every layer, on one card."""
    return 2 * layout.kv_heads_per_card(model) * model.head_dim * model.layers * ITEM_BYTES[kv_format]


def kv_bytes_per_block(model: ModelDescription, layout: Layout, kv_format: KvFormat, block_size: int) -> int:
    """One KV block of `block_size` tokens in every layer, on one card."""
    return block_size * kv_bytes_per_token(model, layout, kv_format)


def _has_repeated_kv_heads(model: ModelDescription, layout: Layout, row: TensorRow) -> bool:
    return row.cut is Cut.KV_HEADS and layout.tensor > model.kv_heads

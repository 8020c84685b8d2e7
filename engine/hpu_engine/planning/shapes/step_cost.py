"""What a shape costs on a card: a roofline over matrix rate and memory bandwidth. Fast, and only as good as the card's
constants; a scheduler compares shapes with it, a plan shows it as an estimate.

Two measures. `work_seconds` grows with every padded row and block and leaves out what does not (reading weights):
padding is judged by it. `step_seconds` is the time a recipe takes, weights included.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpu_engine.planning.cards import Card
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.memory.weights import (
    ITEM_BYTES,
    KvFormat,
    WeightFormat,
    kv_bytes_per_block,
    local_bytes,
)
from hpu_engine.planning.model.description import ModelDescription
from hpu_engine.planning.model.parameters import Part, active_parameter_count, tensor_table
from hpu_engine.planning.shapes.limits import Kind, Size


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds per unit of each kind of recipe, over all layers, on one card."""

    token_seconds: float
    score_seconds: float
    block_seconds: float
    row_seconds: float
    block_row_seconds: float
    logits_seconds: float
    block_size: int
    flat_floor_seconds: float
    head_floor_seconds: float
    launch_seconds: float

    def work_seconds(self, kind: Kind, size: Size) -> float:
        """Time that is proportional to the shape."""
        first, second = size
        match kind:
            case Kind.FLAT:
                return first * self.token_seconds
            case Kind.PREFILL:
                return first * (second * self.block_size + first) * self.score_seconds
            case Kind.DECODE:
                return second * self.block_seconds + first * (self.row_seconds + second * self.block_row_seconds)
            case Kind.SAMPLER:
                return first * self.logits_seconds

    def step_seconds(self, kind: Kind, size: Size) -> float:
        """Time of one call: the work, at least the reading of the weights, and the launch."""
        work = self.work_seconds(kind, size)
        if kind is Kind.FLAT:
            work = max(work, self.flat_floor_seconds)
        elif kind is Kind.SAMPLER:
            work = max(work, self.head_floor_seconds)
        return work + self.launch_seconds


def step_cost(
    model: ModelDescription,
    layout: Layout,
    card: Card,
    *,
    weight_format: WeightFormat,
    kv_format: KvFormat,
    block_size: int,
) -> StepCost:
    """The cost of `model` under `layout` on `card`. Attention multiplies in the KV cache's dtype's matrix rate."""
    peak = card.matrix_flops_fp8 if weight_format == "fp8" else card.matrix_flops_bf16
    rate, attention_rate = peak * card.efficiency, card.matrix_flops_bf16 * card.efficiency
    head = model.vocab * model.hidden
    heads = model.heads // layout.tensor
    width = heads * model.head_dim * model.layers
    item = ITEM_BYTES["float32" if weight_format == "float32" else "bfloat16"]
    weights = {row.part: 0 for row in tensor_table(model)}
    for row in tensor_table(model):
        weights[row.part] += local_bytes(model, layout, row, weight_format)
    head_bytes = weights[Part.EMBEDDING if model.tied_embeddings else Part.HEAD]
    flat_bytes = sum(size for part, size in weights.items() if part not in (Part.EMBEDDING, Part.HEAD))
    return StepCost(
        token_seconds=2 * (active_parameter_count(model) - head) / layout.tensor / rate,
        score_seconds=4 * width / attention_rate,
        block_seconds=kv_bytes_per_block(model, layout, kv_format, block_size) / card.memory_bandwidth,
        row_seconds=2 * width * item / card.memory_bandwidth,
        # Rows find their blocks by a product with a one-hot matrix [blocks, rows], once there and once back.
        block_row_seconds=4 * width / attention_rate,
        logits_seconds=2 * head / layout.tensor / rate,
        block_size=block_size,
        flat_floor_seconds=flat_bytes / card.memory_bandwidth,
        head_floor_seconds=head_bytes / card.memory_bandwidth,
        launch_seconds=card.launch_seconds,
    )

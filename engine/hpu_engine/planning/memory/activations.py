"""Bytes that the largest step needs beside weights and cache: every tensor of it, by phase.

A phase is a recipe's working set. The residual stream lives through all phases; the phases follow each other, so the
step needs the residual stream plus its largest phase. Tensors are those of a plain transformer step; a fused device
kernel may keep some of them on chip, never more of them in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from hpu_engine.planning.layout import Layout
from hpu_engine.planning.memory.weights import ITEM_BYTES
from hpu_engine.planning.model.description import ModelDescription
from hpu_engine.planning.shapes.limits import Kind, StepLimits

EXPERT_CHUNK_TOKENS = 1024
"""Tokens whose expert activations exist at one time; longer steps run their experts in chunks."""


@dataclass(frozen=True, slots=True)
class ActivationTensor:
    phase: str
    name: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """`tensors` of every phase; `bytes` is what must be free at once, `peak_phase` the phase that needs most."""

    tensors: tuple[ActivationTensor, ...]
    resident_bytes: int
    phase_bytes: dict[str, int]

    @property
    def peak_phase(self) -> str:
        return max(self.phase_bytes, key=lambda phase: self.phase_bytes[phase])

    @property
    def bytes(self) -> int:
        return self.resident_bytes + self.phase_bytes[self.peak_phase]


RESIDENT = "residual stream"


def activation_plan(model: ModelDescription, layout: Layout, limits: StepLimits, *, dtype: str) -> ActivationPlan:
    """The largest shape of every kind that `limits` allow, on one card; `dtype` is that of activations and KV."""
    item = ITEM_BYTES[dtype]
    tokens = limits.flat_tokens
    tensors = [
        *_flat(model, layout, tokens, item),
        *_prefill(model, layout, limits, tokens, item),
        *_decode(model, layout, limits, tokens, item),
        *_sampler(model, layout, limits.largest(Kind.SAMPLER)[0], item),
    ]
    phases: dict[str, int] = {}
    for tensor in tensors:
        if tensor.phase != RESIDENT:
            phases[tensor.phase] = phases.get(tensor.phase, 0) + tensor.bytes
    resident = sum(tensor.bytes for tensor in tensors if tensor.phase == RESIDENT)
    return ActivationPlan(tuple(tensors), resident, phases)


def _flat(model: ModelDescription, layout: Layout, tokens: int, item: int) -> Iterator[ActivationTensor]:
    yield ActivationTensor(RESIDENT, "hidden states", (tokens, model.hidden), item)
    yield ActivationTensor(RESIDENT, "residual", (tokens, model.hidden), item)
    yield ActivationTensor(RESIDENT, "rotary cos and sin", (2, tokens, model.head_dim), 4)
    if model.dense_layer_count:
        width = model.intermediate // layout.tensor
        yield ActivationTensor("dense MLP", "gate and up", (tokens, 2 * width), item)
        yield ActivationTensor("dense MLP", "product", (tokens, width), item)
        yield ActivationTensor("dense MLP", "output", (tokens, model.hidden), item)
    moe = model.moe
    if moe is None:
        return
    gathered = tokens * layout.data
    chunk = min(gathered, EXPERT_CHUNK_TOKENS) * moe.top_k
    width = moe.intermediate if layout.expert > 1 else moe.intermediate // layout.tensor
    yield ActivationTensor("MoE", "router logits", (tokens, moe.experts), 4)
    yield ActivationTensor("MoE", "expert ids", (gathered, moe.top_k), 8)
    yield ActivationTensor("MoE", "expert weights", (gathered, moe.top_k), item)
    if layout.data > 1:
        yield ActivationTensor("MoE", "gathered hidden states", (gathered, model.hidden), item)
    yield ActivationTensor("MoE", "gate and up of a chunk", (chunk, 2 * width), item)
    yield ActivationTensor("MoE", "product of a chunk", (chunk, width), item)
    yield ActivationTensor("MoE", "output", (gathered, model.hidden), item)
    if moe.shared_experts:
        shared = moe.shared_intermediate // layout.tensor
        yield ActivationTensor("shared experts", "gate and up", (tokens, 2 * shared), item)
        yield ActivationTensor("shared experts", "product", (tokens, shared), item)
        yield ActivationTensor("shared experts", "output of both", (2, tokens, model.hidden), item)


def _projections(
    phase: str, model: ModelDescription, layout: Layout, tokens: int, item: int
) -> Iterator[ActivationTensor]:
    queries = model.heads // layout.tensor * model.head_dim
    keys = layout.kv_heads_per_card(model) * model.head_dim
    yield ActivationTensor(phase, "query, key, value", (tokens, queries + 2 * keys), item)
    yield ActivationTensor(phase, "attention output", (tokens, queries), item)


def _prefill(
    model: ModelDescription, layout: Layout, limits: StepLimits, tokens: int, item: int
) -> Iterator[ActivationTensor]:
    new, blocks = limits.largest(Kind.PREFILL)
    seen = blocks * limits.block_size + new
    heads, kv_heads = model.heads // layout.tensor, layout.kv_heads_per_card(model)
    phase = "prefill attention"
    yield from _projections(phase, model, layout, tokens, item)
    yield ActivationTensor(phase, "query of the row", (new, heads, model.head_dim), item)
    yield ActivationTensor(phase, "keys and values", (2, seen, kv_heads, model.head_dim), item)
    yield ActivationTensor(phase, "mask", (new, seen), item)


def _decode(
    model: ModelDescription, layout: Layout, limits: StepLimits, tokens: int, item: int
) -> Iterator[ActivationTensor]:
    rows, blocks = limits.largest(Kind.DECODE)
    block_size = limits.block_size
    heads, kv_heads = model.heads // layout.tensor, layout.kv_heads_per_card(model)
    phase = "decode attention"
    yield from _projections(phase, model, layout, tokens, item)
    yield ActivationTensor(phase, "keys and values", (2, blocks, block_size, kv_heads, model.head_dim), item)
    yield ActivationTensor(phase, "row of each block", (blocks, rows), item)
    yield ActivationTensor(phase, "query by block", (blocks, heads, model.head_dim), item)
    yield ActivationTensor(phase, "scores", (blocks, heads, block_size), 4)
    yield ActivationTensor(phase, "values by block", (blocks, heads, model.head_dim), item)


def _sampler(model: ModelDescription, layout: Layout, rows: int, item: int) -> Iterator[ActivationTensor]:
    yield ActivationTensor("sampler", "selected rows", (rows, model.hidden), item)
    yield ActivationTensor("sampler", "logits of a card", (rows, model.vocab // layout.tensor), item)
    if layout.tensor > 1:
        yield ActivationTensor("sampler", "logits", (rows, model.vocab), item)
    yield ActivationTensor("sampler", "probabilities, sorted and as they came", (2, rows, model.vocab), 4)

"""What a specification comes to on a card: types, limits, KV blocks, buckets, memory. Settled once, used everywhere.

Pure: a function of settings, model, layout and card table, never of a measurement. So every rank of a group,
`hpu-engine plan` and the operator come to the same values on their own.

Room. A model length that was asked for must have room in the KV cache, and so must the model's own where the cache
takes all that is left of a card. Where the cache has a given size and no length was asked for, the cache bounds a
request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Literal, cast

from hpu_engine.planning.cards import BLOCK_SIZE, MAX_NUM_SEQS, RECIPES, Card, Processor
from hpu_engine.planning.layout import Layout, layout_violations
from hpu_engine.planning.memory.budget import KV_BLOCKS, KV_MEMORY, limit_violations, memory_violations
from hpu_engine.planning.memory.plan import MemoryPlan, memory_plan
from hpu_engine.planning.memory.weights import ITEM_BYTES, KvFormat, WeightFormat, kv_bytes_per_block
from hpu_engine.planning.model.description import DType, ModelDescription
from hpu_engine.planning.shapes.buckets import BucketSet, plan_buckets
from hpu_engine.planning.shapes.limits import Kind, StepLimits
from hpu_engine.planning.shapes.step_cost import StepCost, step_cost
from hpu_engine.planning.shapes.trace import Lengths, assumed_histogram, fitted_histogram
from hpu_engine.planning.violations import PlanError, Violation

Kernels = Literal["torch", "compiled", "tiles"]

CPU_DTYPES = ("bfloat16", "float32")
GAUDI_DTYPES = (*CPU_DTYPES, "fp8")
COMPILED_MULTIPLE = 8
"""What the elements of a head have to be a multiple of for the engine's compiled kernels."""
TILE_MULTIPLE = 32
"""For its kernels on tiles: of the elements of a head, the tokens of a KV block, the middle of an MLP."""


@dataclass(frozen=True, slots=True)
class Specification:
    """What is asked for. None: the card's default, or what the model allows."""

    model: ModelDescription
    card: Card
    layout: Layout = field(default_factory=Layout)
    dtype: str = "auto"
    kv_format: KvFormat | None = None
    max_model_len: int | None = None
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int | None = None
    block_size: int = BLOCK_SIZE
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    recipes: int = RECIPES
    trace: Sequence[Lengths] | None = field(default=None, repr=False)
    fp8_dispatch: bool = False
    exact: bool = False
    force_buckets: bool = False
    kernels: Literal["auto", "torch"] = "auto"
    compile: bool = False


@dataclass(frozen=True)
class Settled:
    """One value for a whole group. `limits` bound a step and hold the pool's `kv_blocks`; `max_model_len` is what model
    and specification allow, which the pool may cut shorter (`limits.max_model_len`).

    `violations`: what does not fit; empty where it can run.
    """

    compute_dtype: DType
    weight_format: WeightFormat
    kv_format: KvFormat
    kernels: Kernels
    max_model_len: int
    limits: StepLimits
    memory: MemoryPlan
    violations: tuple[Violation, ...]
    specification: Specification

    @property
    def fits(self) -> bool:
        return not self.violations

    @cached_property
    def cost(self) -> StepCost:
        asked = self.specification
        return step_cost(
            asked.model,
            asked.layout,
            asked.card,
            weight_format=self.weight_format,
            kv_format=self.kv_format,
            block_size=self.limits.block_size,
        )

    @cached_property
    def buckets(self) -> BucketSet | None:
        """None on a CPU that pads nothing: steps run in the shapes they have. Raises TooFewRecipes."""
        is_padded = self.specification.card.processor is None or self.specification.force_buckets
        return self.buckets_for(self.limits) if is_padded else None

    def buckets_for(self, limits: StepLimits) -> BucketSet:
        """The buckets where the limits of a step are others."""
        trace = self.specification.trace
        histogram = assumed_histogram(limits) if trace is None else fitted_histogram(trace, limits)
        return plan_buckets(limits, self.cost, histogram, recipes=self.specification.recipes)

    @property
    def digest(self) -> str:
        """Equal where two ranks would run the same steps in the same types and shapes."""
        shapes = {kind: [b.size for b in self.buckets.of(kind)] for kind in Kind} if self.buckets else None
        types = (self.compute_dtype, self.weight_format, self.kv_format, self.kernels)
        settings = (self.max_model_len, asdict(self.limits), asdict(self.specification.layout))
        return sha256(json.dumps([types, settings, self.specification.exact, shapes]).encode()).hexdigest()


def settle(specification: Specification) -> Settled:
    """Raises PlanError where the specification contradicts itself, its model or its card. One that does not fit is
    settled, with violations.
    """
    model, layout, card = specification.model, specification.layout, specification.card
    limits = _limits(specification)
    wrong = (
        *_type_violations(specification),
        *layout_violations(model, layout),
        *limit_violations(model, limits),
    )
    if wrong:
        raise PlanError(wrong)
    compute, weights, kernels = _types(specification, limits.block_size)
    kv_format = specification.kv_format or (compute if kernels != "tiles" else "bfloat16")
    block_bytes = kv_bytes_per_block(model, layout, kv_format, limits.block_size)
    blocks = _pool(specification, limits, block_bytes)
    if blocks is not None and specification.max_model_len is None:
        limits = replace(limits, max_model_len=min(limits.max_model_len, blocks * limits.block_size))
    limits = replace(limits, kv_blocks=blocks)
    memory = memory_plan(
        model,
        layout,
        card,
        limits,
        dtype=compute,
        weight_format=weights,
        kv_format=kv_format,
        recipes=specification.recipes,
    )
    # Where nothing fits, the buckets are those of a card that just holds one request.
    held = memory.kv_blocks if memory.fits else max(memory.kv_blocks, limits.blocks_per_row)
    return Settled(
        compute_dtype=compute,
        weight_format=weights,
        kv_format=kv_format,
        kernels=kernels,
        max_model_len=specification.max_model_len or model.max_positions,
        limits=replace(limits, kv_blocks=held),
        memory=memory,
        violations=memory_violations(limits, memory),
        specification=specification,
    )


def _limits(asked: Specification) -> StepLimits:
    """Without the pool. The default budget is the card's, as far as blocks and sequences allow."""
    length = asked.model.max_positions if asked.max_model_len is None else asked.max_model_len
    sequences, size, budget = asked.max_num_seqs, asked.block_size, asked.max_num_batched_tokens
    if budget is None:
        least, most, unit = max(size, sequences), sequences * length, max(size, 1)
        wanted = max(least, min(asked.card.max_num_batched_tokens, most))
        budget = min(-(-wanted // unit) * unit, max(least, most))
    return StepLimits(length, sequences, budget, size)


def _type_violations(asked: Specification) -> Iterator[Violation]:
    processor = asked.card.processor
    dtypes = GAUDI_DTYPES if processor is None else CPU_DTYPES
    if asked.dtype not in ("auto", *dtypes):
        yield Violation("dtype", "card", asked.dtype, f"{asked.card.name} supports {', '.join(dtypes)}")
    if asked.kv_format is not None and asked.kv_format not in ITEM_BYTES:
        yield Violation("kvCache", "format", asked.kv_format, f"supported are {', '.join(ITEM_BYTES)}")
    if processor is None:
        only_cpu = {
            "exact": asked.exact,
            "forceBuckets": asked.force_buckets,
            "kernels": asked.kernels if asked.kernels != "auto" else False,
            "compile": asked.compile,
        }
        for name, value in only_cpu.items():
            if value:
                yield Violation(name, "cpu", str(value).lower(), "only device cpu has this setting")
        return
    if asked.kv_format is not None:
        yield Violation("kvCache", "cpu", asked.kv_format, "on a CPU the type of the KV cache follows from dtype")
    if asked.compile and asked.kernels == "torch":
        message = "builds the engine's own kernels, and kernels torch forbids them; leave one of the two out"
        yield Violation("compile", "kernels", "true", message)
    if asked.compile and asked.model.head_dim % COMPILED_MULTIPLE:
        message = f"takes heads of a multiple of {COMPILED_MULTIPLE} elements; this model's have {asked.model.head_dim}"
        yield Violation("compile", "heads", "true", message)


def _types(asked: Specification, block_size: int) -> tuple[DType, WeightFormat, Kernels]:
    """Types of activations and of weights, and what computes.

    On a Gaudi everything but fp8 is computed in bfloat16 unless float32 is asked for. On a CPU without fast bfloat16
    everything is float32; tiles multiply bfloat16 and sum in float32.
    """
    model, processor = asked.model, asked.card.processor
    if processor is None:
        weights = cast(WeightFormat, asked.dtype)
        if asked.dtype == "auto":
            weights = "fp8" if model.quantization == "fp8" else "bfloat16"
        return "float32" if weights == "float32" else "bfloat16", weights, "torch"
    # bfloat16 would lose digits of float16.
    own: DType = "float32" if model.dtype == "float16" else model.dtype
    requested = own if asked.dtype == "auto" else cast(DType, asked.dtype)
    if requested == "bfloat16" and _on_tiles(asked, processor, block_size):
        return "float32", "bfloat16", "tiles"
    compute: DType = requested if processor.bfloat16 and not asked.compile else "float32"
    return compute, compute, "compiled" if asked.compile else "torch"


def _on_tiles(asked: Specification, processor: Processor, block_size: int) -> bool:
    # Exact and padded attention are torch's, in one type with the linears.
    if asked.exact or asked.force_buckets or not processor.tiles:
        return False
    has_kernels = asked.compile or (asked.kernels == "auto" and processor.kernels_ahead)
    return has_kernels and asked.model.head_dim % TILE_MULTIPLE == 0 and block_size % TILE_MULTIPLE == 0


def _pool(asked: Specification, limits: StepLimits, block_bytes: int) -> int | None:
    """KV blocks beside scratch; None: as many as fit. Raises PlanError where they hold no request."""
    size, memory = limits.block_size, asked.kv_cache_memory_bytes
    if asked.num_kv_blocks is not None:
        blocks = asked.num_kv_blocks
        if blocks < 1:
            raise PlanError([Violation(KV_BLOCKS, "range", blocks, "at least 1 is needed", (1,))])
    else:
        memory = asked.card.kv_cache_memory_bytes if memory is None else memory
        if memory is None:
            return None
        blocks = memory // block_bytes - limits.scratch_blocks
        if blocks < 1:
            message = f"holds no block beside {limits.scratch_blocks} of scratch; one block takes {block_bytes} bytes"
            least = (limits.scratch_blocks + 1) * block_bytes
            raise PlanError([Violation(KV_MEMORY, "range", memory, message, (least,))])
    if blocks * size < 2:
        message = f"{blocks} block of block-size {size} holds {blocks * size} token; the shortest request takes 2"
        raise PlanError([Violation(KV_BLOCKS, "range", blocks, message, (-(-2 // size),))])
    return blocks

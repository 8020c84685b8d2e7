"""What a specification comes to on a card: types, limits, KV blocks, buckets, memory. Settled once, used everywhere.

Pure: a function of specification, model, card table and layout, never of a measurement. So every rank of a group,
`hpu-engine plan` and the operator come to the same values on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from hpu_engine.planning.cards import Card
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.memory.plan import MemoryPlan
from hpu_engine.planning.memory.weights import KvFormat, WeightFormat
from hpu_engine.planning.model.description import DType, ModelDescription
from hpu_engine.planning.shapes.buckets import BucketSet
from hpu_engine.planning.shapes.limits import StepLimits
from hpu_engine.planning.shapes.trace import Lengths

Kernels = Literal["torch", "compiled", "tiles"]


@dataclass(frozen=True, slots=True)
class Specification:
    """What is asked for. None: the card's default, or what the model allows."""

    model: ModelDescription
    card: Card
    layout: Layout = field(default_factory=Layout)
    dtype: str = "auto"
    kv_format: KvFormat | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    recipes: int | None = None
    trace: Sequence[Lengths] | None = None
    fp8_dispatch: bool = False
    exact: bool = False
    force_buckets: bool = False
    kernels: Literal["auto", "torch"] = "auto"
    compile: bool = False


@dataclass(frozen=True)
class Settled:
    """One value for a whole group. `limits` bound a step and hold the pool's `kv_blocks`; `max_model_len` is what the
    model or the specification allows, which the pool may cut shorter (`limits.max_model_len`).
    """

    specification: Specification
    compute_dtype: DType
    weight_format: WeightFormat
    kv_format: KvFormat
    kernels: Kernels
    max_model_len: int
    limits: StepLimits
    memory: MemoryPlan
    recipes: int

    @cached_property
    def buckets(self) -> BucketSet | None:
        """None where steps run in the shapes they have."""
        raise NotImplementedError


def settle(specification: Specification) -> Settled:
    """Raises PlanError where the specification contradicts itself, the model, or the card."""
    raise NotImplementedError

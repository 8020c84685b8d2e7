"""Warm-up: in which order, for how long, with how much memory.

Order: largest estimated cost first over all kinds together. The first run then obtains the memory that serves all
others, and a set that does not fit fails in its first minute instead of its last.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpu_engine.planning.cards import MIB, Card, Seconds
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.memory.activations import activation_plan
from hpu_engine.planning.memory.allocator import Run, WarmUpMemory, ascending, warm_up_memory
from hpu_engine.planning.model.description import ModelDescription
from hpu_engine.planning.shapes.buckets import Bucket, BucketSet
from hpu_engine.planning.shapes.limits import Kind, StepLimits

KEPT_BYTES = 4 * MIB
"""What a recipe keeps where nothing was measured: command buffers and static outputs."""

_PHASES = {
    Kind.FLAT: ("dense MLP", "MoE", "shared experts"),
    Kind.PREFILL: ("prefill attention",),
    Kind.DECODE: ("decode attention",),
    Kind.SAMPLER: ("sampler",),
}


@dataclass(frozen=True, slots=True)
class WarmUpPlan:
    """`order` is the order to run in; seconds with the recipe cache cold (everything compiled) and warm (read)."""

    order: tuple[Bucket, ...]
    cold: Seconds
    warm: Seconds
    memory: WarmUpMemory
    ascending_memory: WarmUpMemory


def warm_up_plan(model: ModelDescription, layout: Layout, card: Card, buckets: BucketSet, *, dtype: str) -> WarmUpPlan:
    """The plan for running every bucket of the set once on each card."""
    order = warm_up_order(buckets)
    running = sum(bucket.seconds * bucket.recipes for bucket in order)
    run = Seconds(low=running, high=running, measured=card.calibrated)
    runs = [warm_up_run(model, layout, card, bucket, buckets.limits, dtype=dtype) for bucket in order]
    return WarmUpPlan(
        order=order,
        cold=card.compile_seconds.times(buckets.recipes) + run,
        warm=card.load_seconds.times(buckets.recipes) + run,
        memory=warm_up_memory(runs),
        ascending_memory=warm_up_memory(ascending(runs)),
    )


def warm_up_order(buckets: BucketSet) -> tuple[Bucket, ...]:
    """Every bucket, largest estimated cost first; ties by name, so that all ranks agree."""
    return tuple(sorted(buckets, key=lambda bucket: (-bucket.seconds, str(bucket))))


def warm_up_run(
    model: ModelDescription, layout: Layout, card: Card, bucket: Bucket, limits: StepLimits, *, dtype: str
) -> Run:
    """What the bucket's recipe needs while it runs and keeps afterwards."""
    kept = KEPT_BYTES if card.graph_bytes_per_recipe is None else card.graph_bytes_per_recipe
    workspace = workspace_bytes(model, layout, bucket, limits, dtype=dtype)
    return Run(str(bucket), workspace, kept * bucket.recipes)


def workspace_bytes(model: ModelDescription, layout: Layout, bucket: Bucket, limits: StepLimits, *, dtype: str) -> int:
    """Bytes of the largest phase of the bucket's recipe."""
    first, second = bucket.size
    match bucket.kind:
        case Kind.FLAT:
            shape = StepLimits(first, 1, first, limits.block_size)
        case Kind.PREFILL:
            shape = StepLimits(first + second * limits.block_size, 1, first, limits.block_size)
        case Kind.DECODE:
            row = -(-second // first) * limits.block_size
            shape = StepLimits(row, first, first, limits.block_size, second)
        case Kind.SAMPLER:
            shape = StepLimits(1, first, first, limits.block_size)
    phases = activation_plan(model, layout, shape, dtype=dtype).phase_bytes
    return max(phases[phase] for phase in _PHASES[bucket.kind] if phase in phases)

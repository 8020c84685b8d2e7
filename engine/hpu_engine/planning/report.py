"""A plan as text for a person and as a document for a program. Every figure of the text is in the document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from hpu_engine.planning.cards import GIB, Seconds
from hpu_engine.planning.memory.plan import MemoryPlan
from hpu_engine.planning.plan import Plan
from hpu_engine.planning.recommend import Recommendation
from hpu_engine.planning.shapes.buckets import Bucket, BucketSet
from hpu_engine.planning.shapes.limits import Kind
from hpu_engine.planning.shapes.warm_up_plan import WarmUpPlan
from hpu_engine.planning.violations import in_flags


def plan_document(
    plan: Plan, *, ways_out: tuple[str, ...] = (), recommendation: Recommendation | None = None
) -> dict[str, Any]:
    """JSON-ready: the plan with every field and property, names in camelCase; sizes in bytes, times in seconds."""
    document = {"verdict": verdict(plan), "possible": list(ways_out), **as_document(plan)}
    return document if recommendation is None else document | {"recommendation": as_document(recommendation)}


def as_document(value: Any) -> Any:
    """`value` as JSON has it: fields and properties of a dataclass, the name of a bucket, sizes of a set of buckets."""
    if isinstance(value, BucketSet):
        value = {"recipes": value.recipes, **{kind: [bucket.size for bucket in value.of(kind)] for kind in Kind}}
    if isinstance(value, dict):
        return {str(key): as_document(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_document(item) for item in value]
    if isinstance(value, BaseModel | Bucket):
        return str(value) if isinstance(value, Bucket) else value.model_dump(mode="json")
    if not is_dataclass(value):
        return value
    derived = [name for name, kind in vars(type(value)).items() if isinstance(kind, property | cached_property)]
    names = [*(field.name for field in fields(value) if field.repr), *derived]
    return {re.sub("_(.)", lambda found: found[1].upper(), name): as_document(getattr(value, name)) for name in names}


def verdict(plan: Plan) -> str:
    """One sentence with the arithmetic in it."""
    memory = plan.settled.memory
    if plan.fits and memory.visible_bytes is None:
        return (
            f"needs {gib(memory.needed_bytes)} of memory: {gib(memory.weight_bytes)} weights + "
            f"{gib(memory.activations.bytes)} largest step + {gib(memory.reserve_bytes)} reserve + "
            f"{gib(memory.kv_bytes)} for {memory.kv_tokens:,} KV tokens"
        )
    if plan.fits:
        return (
            f"fits: {gib(memory.weight_bytes)} weights + {gib(memory.activations.bytes)} largest step + "
            f"{gib(memory.graph_bytes)} graphs + {gib(memory.reserve_bytes)} reserve leave {gib(memory.kv_bytes)} of "
            f"{gib(memory.visible_bytes or 0)} for {memory.kv_tokens:,} KV tokens"
        )
    reasons = in_flags(plan.settled.violations)
    missing = f"; {gib(memory.shortfall_bytes)} are missing on each card" if memory.shortfall_bytes else ""
    return f"does not fit: {reasons}{missing}"


def plan_text(plan: Plan, *, ways_out: tuple[str, ...] = (), recommendation: Recommendation | None = None) -> str:
    """A table to read in ten seconds, then the details."""
    rows = list(_summary(plan, ways_out, recommendation))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
    lines += ["", *_memory_details(plan.settled.memory), ""]
    if plan.settled.buckets is not None and plan.warm_up is not None:
        lines += _bucket_details(plan.settled.buckets, plan.warm_up)
    lines += _traffic_details(plan)
    return "\n".join(lines).rstrip() + "\n"


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def duration(seconds: Seconds) -> str:
    """A range in seconds or minutes; a measured value alone."""
    low, high = _time(seconds.low), _time(seconds.high)
    if seconds.measured or low == high:
        return low
    return f"{low} to {high} (not calibrated)"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _summary(plan: Plan, ways_out: tuple[str, ...], recommendation: Recommendation | None) -> Iterator[tuple[str, str]]:
    settled, memory = plan.settled, plan.settled.memory
    request, layout = settled.specification, settled.specification.layout
    yield "verdict", verdict(plan)
    if ways_out:
        yield "possible", "; ".join(ways_out)
    yield (
        "model",
        f"{request.model.architecture}, {plan.parameters / 1e9:.2f} B parameters, "
        f"{plan.active_parameters / 1e9:.2f} B for each token, {settled.weight_format} weights, "
        f"{settled.kv_format} cache",
    )
    yield (
        "cards",
        f"{layout.cards} x {request.card.name} (tensor {layout.tensor}, data {layout.data}, expert {layout.expert}), "
        f"{layout.pods} pod{'s' if layout.pods > 1 else ''} of {layout.pod_cards}",
    )
    if request.card.processor is not None:
        yield "computes", f"in {settled.compute_dtype}, {_KERNELS[settled.kernels]}"
    if recommendation is not None:
        yield "recommended", recommendation.reason
    yield "step", f"at most {settled.limits.max_batched_tokens} tokens of {settled.limits.max_num_seqs} requests"
    longest = min(settled.limits.max_model_len, memory.blocks_needed * memory.block_size)
    yield "KV tokens", f"{memory.kv_tokens:,} for each rank; one longest request needs {longest:,}"
    if settled.buckets is None or plan.warm_up is None:
        yield "buckets", "none: steps run in the shapes they have"
    else:
        counts = ", ".join(f"{len(settled.buckets.of(kind))} {kind}" for kind in Kind)
        yield "buckets", f"{settled.buckets.recipes} recipes ({counts})"
        yield "warm-up", f"cold {duration(plan.warm_up.cold)}, warm {duration(plan.warm_up.warm)}"
    yield "bytes/token", f"{plan.bytes_per_token:,.0f} B received by each card" if plan.traffic else "0 (one card)"


_KERNELS = {
    "torch": "with torch's kernels",
    "compiled": "with kernels compiled at start-up",
    "tiles": "with the engine's kernels on AMX tiles",
}


def _memory_details(memory: MemoryPlan) -> Iterator[str]:
    yield "memory of one card"
    for line in memory.weights:
        held = f"  ({gib(line.replicated_bytes)} on other cards too)" if line.replicated_bytes else ""
        yield _line(f"weights, {line.part.value}", line.bytes) + held
    activations = memory.activations
    yield _line("residual stream", activations.resident_bytes)
    yield _line(f"largest phase, {activations.peak_phase}", activations.bytes - activations.resident_bytes)
    yield _line("graphs", memory.graph_bytes)
    yield _line("runtime reserve", memory.reserve_bytes)
    blocks = f"{memory.kv_blocks} blocks of {memory.kv_block_bytes:,} B + {memory.scratch_blocks} scratch"
    yield _line(f"KV cache, {blocks}", memory.kv_bytes)
    if memory.visible_bytes is not None:
        yield _line("free", memory.free_bytes)
        yield _line("visible", memory.visible_bytes)


def _bucket_details(buckets: BucketSet, warm_up: WarmUpPlan) -> Iterator[str]:
    yield "buckets"
    for kind in Kind:
        sizes = (bucket.size for bucket in buckets.of(kind))
        shown = " ".join(str(a) if kind in (Kind.FLAT, Kind.SAMPLER) else f"{a}+{b}" for a, b in sizes)
        yield f"  {kind.value:8} {shown}"
    peak, wrong = warm_up.memory.peak_bytes, warm_up.ascending_memory.peak_bytes
    yield f"  warm-up starts with {warm_up.order[0]}; reserves {gib(peak)}, smallest first would {gib(wrong)}"
    yield ""


def _traffic_details(plan: Plan) -> Iterator[str]:
    if not plan.traffic:
        return
    yield "between cards, for each token of the group"
    for line in plan.traffic:
        yield f"  {line.name:42} {line.bytes_per_token:14,.0f} B  {line.launches:4} launches a step"


def _line(name: str, size: int) -> str:
    return f"  {name:52} {gib(size):>12}"

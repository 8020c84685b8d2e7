"""A plan as text for a person and as a document for a program. Every figure of the text is in the document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpu_engine.planning.cards import GIB, Seconds
from hpu_engine.planning.plan import Plan
from hpu_engine.planning.recommend import Recommendation
from hpu_engine.planning.shapes.limits import Kind


def plan_document(
    plan: Plan, *, ways_out: tuple[str, ...] = (), recommendation: Recommendation | None = None
) -> dict[str, Any]:
    """JSON-ready; sizes in bytes, times in seconds, keys in camelCase."""
    memory, layout, request = plan.memory, plan.request.layout, plan.request
    document: dict[str, Any] = {
        "fits": plan.fits,
        "verdict": verdict(plan),
        "violations": [
            {
                "field": v.field,
                "rule": v.rule,
                "value": v.value,
                "message": v.message,
                "nearestValid": list(v.nearest),
            }
            for v in plan.violations
        ],
        "possible": list(ways_out),
        "model": {
            "architecture": request.model.architecture.value,
            "parameters": plan.parameters,
            "activeParameters": plan.active_parameters,
        },
        "card": request.card.model_dump(),
        "layout": {
            "tensor": layout.tensor,
            "data": layout.data,
            "expert": layout.expert,
            "cards": layout.cards,
            "cardsPerPod": layout.pod_cards,
            "pods": layout.pods,
        },
        "limits": {
            "maxModelLen": plan.limits.max_model_len,
            "maxNumSeqs": plan.limits.max_num_seqs,
            "maxBatchedTokens": plan.limits.max_batched_tokens,
            "blockSize": plan.limits.block_size,
        },
        "memory": {
            "visible": memory.visible_bytes,
            "runtimeReserve": memory.reserve_bytes,
            "weights": memory.weight_bytes,
            "weightsReplicated": memory.replicated_bytes,
            "weightsByPart": {line.part.value: line.bytes for line in memory.weights},
            "activations": memory.activations.bytes,
            "activationsByPhase": memory.activations.phase_bytes,
            "residualStream": memory.activations.resident_bytes,
            "graphs": memory.graph_bytes,
            "kvCache": memory.kv_bytes,
            "kvBlock": memory.kv_block_bytes,
            "kvBlocks": memory.kv_blocks,
            "kvBlocksNeeded": memory.blocks_needed,
            "kvTokens": memory.kv_tokens,
            "free": memory.free_bytes,
            "shortfall": memory.shortfall_bytes,
        },
        "buckets": {
            "recipes": plan.buckets.recipes,
            **{kind.value: [list(bucket.size) for bucket in plan.buckets.of(kind)] for kind in Kind},
        },
        "warmUp": {
            "cold": plan.warm_up.cold.model_dump(),
            "warm": plan.warm_up.warm.model_dump(),
            "first": str(plan.warm_up.order[0]),
            "peakBytes": plan.warm_up.memory.peak_bytes,
            "peakBytesAscending": plan.warm_up.ascending_memory.peak_bytes,
        },
        "traffic": {
            "bytesPerToken": plan.bytes_per_token,
            "collectives": [
                {"name": t.name, "layers": t.layers, "bytesPerToken": t.bytes_per_token, "launches": t.launches}
                for t in plan.traffic
            ],
        },
    }
    if recommendation is not None:
        best = recommendation.best
        document["recommendation"] = {
            "layout": str(best) if best else None,
            "reason": recommendation.reason,
            "others": [str(other) for other in recommendation.others],
        }
    return document


def verdict(plan: Plan) -> str:
    """One sentence with the arithmetic in it."""
    memory = plan.memory
    if plan.fits:
        return (
            f"fits: {gib(memory.weight_bytes)} weights + {gib(memory.activations.bytes)} largest step + "
            f"{gib(memory.graph_bytes)} graphs + {gib(memory.reserve_bytes)} reserve leave {gib(memory.kv_bytes)} of "
            f"{gib(memory.visible_bytes)} for {memory.kv_tokens:,} KV tokens"
        )
    reasons = "; ".join(map(str, plan.violations))
    missing = f"; {gib(memory.shortfall_bytes)} are missing on each card" if memory.shortfall_bytes else ""
    return f"does not fit: {reasons}{missing}"


def plan_text(plan: Plan, *, ways_out: tuple[str, ...] = (), recommendation: Recommendation | None = None) -> str:
    """A table to read in ten seconds, then the details."""
    rows = list(_summary(plan, ways_out, recommendation))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
    lines += ["", *_memory_details(plan), "", *_bucket_details(plan), "", *_traffic_details(plan)]
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
    request, memory, layout = plan.request, plan.memory, plan.request.layout
    yield "verdict", verdict(plan)
    if ways_out:
        yield "possible", "; ".join(ways_out)
    yield (
        "model",
        f"{request.model.architecture}, {plan.parameters / 1e9:.2f} B parameters, "
        f"{plan.active_parameters / 1e9:.2f} B for each token, {request.weights()} weights, {request.cache()} cache",
    )
    yield (
        "cards",
        f"{layout.cards} x {request.card.name} (tensor {layout.tensor}, data {layout.data}, expert {layout.expert}), "
        f"{layout.pods} pod{'s' if layout.pods > 1 else ''} of {layout.pod_cards}",
    )
    if recommendation is not None:
        yield "recommended", recommendation.reason
    needed = memory.blocks_needed * memory.block_size
    yield "KV tokens", f"{memory.kv_tokens:,} for each rank; one longest request needs {needed:,}"
    counts = ", ".join(f"{len(plan.buckets.of(kind))} {kind}" for kind in Kind)
    yield "buckets", f"{plan.buckets.recipes} recipes ({counts})"
    yield "warm-up", f"cold {duration(plan.warm_up.cold)}, warm {duration(plan.warm_up.warm)}"
    yield "bytes/token", f"{plan.bytes_per_token:,.0f} B received by each card" if plan.traffic else "0 (one card)"


def _memory_details(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield "memory of one card"
    for line in memory.weights:
        held = f"  ({gib(line.replicated_bytes)} on other cards too)" if line.replicated_bytes else ""
        yield _line(f"weights, {line.part.value}", line.bytes) + held
    yield _line("residual stream", memory.activations.resident_bytes)
    yield _line(f"largest phase, {memory.activations.peak_phase}", memory.activations.bytes - _resident(plan))
    yield _line("graphs", memory.graph_bytes)
    yield _line("runtime reserve", memory.reserve_bytes)
    yield _line(f"KV cache, {memory.kv_blocks} blocks of {memory.kv_block_bytes:,} B + scratch", memory.kv_bytes)
    yield _line("free", memory.free_bytes)
    yield _line("visible", memory.visible_bytes)


def _resident(plan: Plan) -> int:
    return plan.memory.activations.resident_bytes


def _bucket_details(plan: Plan) -> Iterator[str]:
    yield "buckets"
    for kind in Kind:
        sizes = (bucket.size for bucket in plan.buckets.of(kind))
        shown = " ".join(str(a) if kind in (Kind.FLAT, Kind.SAMPLER) else f"{a}+{b}" for a, b in sizes)
        yield f"  {kind.value:8} {shown}"
    peak, wrong = plan.warm_up.memory.peak_bytes, plan.warm_up.ascending_memory.peak_bytes
    yield f"  warm-up starts with {plan.warm_up.order[0]}; reserves {gib(peak)}, smallest first would {gib(wrong)}"


def _traffic_details(plan: Plan) -> Iterator[str]:
    if not plan.traffic:
        return
    yield "between cards, for each token of the group"
    for line in plan.traffic:
        yield f"  {line.name:42} {line.bytes_per_token:14,.0f} B  {line.launches:4} launches a step"


def _line(name: str, size: int) -> str:
    return f"  {name:52} {gib(size):>12}"

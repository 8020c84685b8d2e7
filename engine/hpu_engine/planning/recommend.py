"""What would be possible, and what would be best: layouts for a number of cards, and ways out of a plan that fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpu_engine.planning.cards import CARDS
from hpu_engine.planning.layout import CARDS_PER_SERVER, Layout, layout_violations, valid_tensor_sizes
from hpu_engine.planning.memory.budget import KV_BLOCKS
from hpu_engine.planning.plan import fits
from hpu_engine.planning.settle import Settled, Specification, settle
from hpu_engine.planning.shapes.limits import Kind
from hpu_engine.planning.traffic import step_collective_seconds, step_traffic

TYPICAL_CONTEXT = 2048
"""Tokens of context of a decoding request that layouts are compared at."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """`replicas` groups of `layout`. `tokens_per_second` is a roofline estimate of decoding, for comparison only."""

    layout: Layout
    replicas: int
    tokens_per_second: float
    kv_tokens: int

    def __str__(self) -> str:
        layout = self.layout
        parts = [f"tensor {layout.tensor}"]
        if layout.data > 1:
            parts.append(f"data {layout.data}")
        if layout.expert > 1:
            parts.append(f"expert {layout.expert}")
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        return " x ".join(parts)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`best` is None where no layout of the cards holds the model; `reason` says why in either case."""

    best: Candidate | None
    others: tuple[Candidate, ...]
    reason: str


def recommend(request: Specification, cards: int) -> Recommendation:
    """The layout of `cards` cards that is estimated to decode most tokens per second. Ignores `request.layout`."""
    found = sorted(_candidates(request, cards), key=lambda c: (-c.tokens_per_second, c.layout.cards))
    if not found:
        ways = ways_out(replace(request, layout=Layout()))
        hint = f"; possible: {'; '.join(ways)}" if ways else ""
        return Recommendation(None, (), f"no layout of {cards} {request.card.name} cards holds it{hint}")
    best, *others = found
    return Recommendation(best, tuple(others), _reason(best, others, cards))


def ways_out(request: Specification) -> tuple[str, ...]:
    """Changes, one at a time, that would make an impossible plan possible; the least intrusive first."""
    return tuple(dict.fromkeys(_ways_out(request)))


def _candidates(request: Specification, cards: int) -> Iterator[Candidate]:
    for layout in _layouts(request, cards):
        settled = fits(replace(request, layout=layout))
        if settled is not None:
            replicas, kv_tokens = cards // layout.cards, settled.memory.kv_tokens
            yield Candidate(layout, replicas, _decode_speed(settled) * replicas, kv_tokens * layout.data * replicas)


def _layouts(request: Specification, cards: int) -> Iterator[Layout]:
    """Layouts of at most `cards` cards that repeat to exactly `cards`."""
    for group in (n for n in range(1, cards + 1) if cards % n == 0):
        for tensor in (n for n in range(1, min(group, CARDS_PER_SERVER) + 1) if group % n == 0):
            data = group // tensor
            for expert in {1, group} if request.model.moe is not None else {1}:
                layout = Layout(tensor, data, expert)
                if not layout_violations(request.model, layout):
                    yield layout


def _decode_speed(settled: Settled) -> float:
    """Tokens per second of one group that decodes as many requests as fit, at `TYPICAL_CONTEXT`."""
    request, limits, cost = settled.specification, settled.limits, settled.cost
    layout, card = request.layout, request.card
    context = min(TYPICAL_CONTEXT, limits.max_model_len)
    rows = max(1, min(limits.max_num_seqs, settled.memory.kv_tokens // context))
    blocks = rows * -(-context // limits.block_size)
    seconds = sum(
        cost.step_seconds(kind, size)
        for kind, size in ((Kind.FLAT, (rows, 0)), (Kind.DECODE, (rows, blocks)), (Kind.SAMPLER, (rows, 0)))
    )
    traffic = step_traffic(request.model, layout, fp8_dispatch=request.fp8_dispatch)
    seconds += step_collective_seconds(card, layout, traffic, tokens=rows * layout.data)
    return rows * layout.data / seconds


def _reason(best: Candidate, others: list[Candidate], cards: int) -> str:
    text = f"{best} is estimated at {best.tokens_per_second:,.0f} tokens/s with {best.kv_tokens:,} KV tokens"
    if not others:
        return f"{text}; no other layout of {cards} cards holds the model"
    next_best = others[0]
    return f"{text}; next is {next_best} with {next_best.tokens_per_second:,.0f} and {next_best.kv_tokens:,}"


def _ways_out(request: Specification) -> Iterator[str]:
    model, layout = request.model, request.layout
    settled = settle(request)
    limits, enough = settled.limits, settled.memory.blocks_needed
    if request.num_kv_blocks is not None and fits(replace(request, num_kv_blocks=enough)):
        yield f"{KV_BLOCKS} {enough}"
    shorter = limits.max_model_len // 2
    while shorter >= limits.block_size:
        if fits(replace(request, max_model_len=shorter)):
            yield f"maxModelLen {shorter}"
            break
        shorter //= 2
    for tensor in valid_tensor_sizes(model, expert_parallel=layout.expert > 1, most=CARDS_PER_SERVER):
        if tensor > layout.tensor:
            wider = Layout(tensor, layout.data, tensor * layout.data if layout.expert > 1 else 1)
            if fits(replace(request, layout=wider)):
                yield f"tensor {tensor}"
                break
    if model.moe is not None:
        for layout in _layouts(request, CARDS_PER_SERVER):
            if layout.expert > 1 and fits(replace(request, layout=layout)):
                yield f"tensor {layout.tensor} x data {layout.data} with expert {layout.expert}"
                break
    if settled.weight_format != "fp8" and fits(replace(request, dtype="fp8", kv_format="bfloat16")):
        yield "fp8 weights"
    if request.card.name == "gaudi2" and fits(replace(request, card=CARDS["gaudi3"])):
        yield "gaudi3"

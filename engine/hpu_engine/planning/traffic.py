"""Bytes between cards, per token and layer, and the time they take.

A payload of p bytes per token over n ranks costs every rank, per token of the whole group: all-gather and
reduce-scatter (n-1)/n * p, all-reduce twice that (ring algorithms; the same lower bound holds for any algorithm). An
all-to-all sends a token once to each distinct remote rank that holds one of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import comb

from hpu_engine.planning.cards import Card
from hpu_engine.planning.layout import CARDS_PER_SERVER, Layout
from hpu_engine.planning.model.description import ModelDescription

BF16_BYTES = 2
LOGIT_BYTES = 2
"""Router logits travel in bfloat16."""

HEADER_BYTES = 6
"""What accompanies a token sent to one rank in an all-to-all: a 32-bit id and a bf16 weight."""


class Routing(StrEnum):
    """What tells the other ranks where a token goes, by bytes for each of the top-k choices."""

    LOGITS = "bf16 logits of all experts"
    WIDE_IDS = "64-bit ids and bf16 weights"
    IDS = "32-bit ids and bf16 weights"
    NARROW_IDS = "8-bit ids and bf16 weights"


_CHOICE_BYTES = {Routing.WIDE_IDS: 10, Routing.IDS: 6, Routing.NARROW_IDS: 3}


class Exchange(StrEnum):
    """How a MoE layer moves tokens to experts and back."""

    ALL_REDUCE = "all-reduce"
    GATHER_BF16 = "gather bf16, reduce-scatter"
    GATHER_FP8 = "gather fp8, reduce-scatter"
    ALL_TO_ALL_BF16 = "all-to-all bf16"
    ALL_TO_ALL_FP8 = "all-to-all fp8"


def routing_bytes(routing: Routing, *, experts: int, top_k: int) -> int:
    """Routing information of one token."""
    return LOGIT_BYTES * experts if routing is Routing.LOGITS else _CHOICE_BYTES[routing] * top_k


def all_reduce_bytes(payload: int, ranks: int) -> Fraction:
    """Bytes a rank receives for each token whose `payload` bytes are summed over all ranks."""
    return Fraction(2 * (ranks - 1), ranks) * payload


def gather_bytes(payload: int, ranks: int) -> Fraction:
    """Bytes a rank receives for each token of the whole group: all but its own share."""
    return Fraction(ranks - 1, ranks) * payload


def reduce_scatter_bytes(payload: int, ranks: int) -> Fraction:
    """As `gather_bytes`: partial sums of `payload` bytes for the tokens that the rank keeps."""
    return gather_bytes(payload, ranks)


def remote_ranks(*, experts: int, top_k: int, ranks: int) -> Fraction:
    """Expected number of distinct other ranks that a token's experts live on, for uniform routing."""
    elsewhere = Fraction(comb(experts - experts // ranks, top_k), comb(experts, top_k))
    return (ranks - 1) * (1 - elsewhere)


def exchange_bytes(
    exchange: Exchange, *, hidden: int, experts: int, top_k: int, ranks: int, routing: Routing = Routing.WIDE_IDS
) -> Fraction:
    """Bytes that a rank receives per token of the whole group and per MoE layer. Exact, so a Fraction."""
    full, half = BF16_BYTES * hidden, hidden
    information = routing_bytes(routing, experts=experts, top_k=top_k)
    match exchange:
        case Exchange.ALL_REDUCE:
            return all_reduce_bytes(full, ranks)
        case Exchange.GATHER_BF16:
            return gather_bytes(full + information, ranks) + reduce_scatter_bytes(full, ranks)
        case Exchange.GATHER_FP8:
            return gather_bytes(half + information, ranks) + reduce_scatter_bytes(full, ranks)
        case Exchange.ALL_TO_ALL_BF16 | Exchange.ALL_TO_ALL_FP8:
            sent = full if exchange is Exchange.ALL_TO_ALL_BF16 else half
            reached = remote_ranks(experts=experts, top_k=top_k, ranks=ranks)
            return reached * (sent + HEADER_BYTES + full) / ranks


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective in a step. `bytes_per_token` over all `layers`, per token of the group and card."""

    name: str
    layers: int
    bytes_per_token: float
    launches: int


def step_traffic(model: ModelDescription, layout: Layout, *, fp8_dispatch: bool = False) -> tuple[Traffic, ...]:
    """What one step of `model` moves between the cards of a group under `layout`; empty on one card."""
    lines = []
    full = BF16_BYTES * model.hidden
    if layout.tensor > 1:
        per_layer = all_reduce_bytes(full, layout.tensor) / layout.data
        lines.append(_traffic("attention all-reduce", model.layers, per_layer, 1))
        if model.dense_layer_count:
            lines.append(_traffic("dense MLP all-reduce", model.dense_layer_count, per_layer, 1))
        if model.moe is not None and model.moe.shared_experts and layout.data > 1:
            lines.append(_traffic("shared experts all-reduce", model.sparse_layer_count, per_layer, 1))
    if model.moe is not None and layout.cards > 1:
        lines.append(_moe_traffic(model, layout, fp8_dispatch=fp8_dispatch))
    if layout.tensor > 1:
        # Only the sampled rows cross the wire: one row of logits for each request, not for each token.
        share = gather_bytes(BF16_BYTES * model.vocab, layout.tensor) / layout.data
        lines.append(_traffic("logits gather (per sampled token)", 1, share, 1))
    return tuple(lines)


def _moe_traffic(model: ModelDescription, layout: Layout, *, fp8_dispatch: bool) -> Traffic:
    moe = model.moe
    assert moe is not None
    if layout.data == 1:
        per_layer = all_reduce_bytes(BF16_BYTES * model.hidden, layout.tensor)
        return _traffic("MoE all-reduce", model.sparse_layer_count, per_layer, 1)
    exchange = Exchange.GATHER_FP8 if fp8_dispatch else Exchange.GATHER_BF16
    per_layer = exchange_bytes(exchange, hidden=model.hidden, experts=moe.experts, top_k=moe.top_k, ranks=layout.cards)
    return _traffic(f"MoE {exchange}", model.sparse_layer_count, per_layer, 2)


def _traffic(name: str, layers: int, per_layer: Fraction, launches: int) -> Traffic:
    return Traffic(name, layers, float(per_layer * layers), launches * layers)


def collective_seconds(card: Card, payload_bytes: float, *, ranks: int) -> float:
    """alpha + bytes / beta; beta is the link inside a server, or the scale-out ports once a group spans servers."""
    beta = card.scale_up_bandwidth if ranks <= CARDS_PER_SERVER else card.scale_out_bandwidth
    return card.alpha_seconds + payload_bytes / beta


def step_collective_seconds(card: Card, layout: Layout, traffic: tuple[Traffic, ...], *, tokens: int) -> float:
    """Time on the wire of one step of `tokens` tokens over the whole group, nothing overlapped."""
    beta = card.scale_up_bandwidth if layout.cards <= CARDS_PER_SERVER else card.scale_out_bandwidth
    launches = sum(line.launches for line in traffic)
    return launches * card.alpha_seconds + tokens * sum(line.bytes_per_token for line in traffic) / beta

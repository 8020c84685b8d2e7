"""Bytes between ranks: worked numbers, and the identities that tie the collectives together."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hpu_engine.planning.cards import CARDS
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.traffic import (
    Exchange,
    Routing,
    all_reduce_bytes,
    collective_seconds,
    exchange_bytes,
    gather_bytes,
    reduce_scatter_bytes,
    remote_ranks,
    routing_bytes,
    step_collective_seconds,
    step_traffic,
)
from tests.planning.facts import ERNIE_21B, ERNIE_300B, LLAMA_8B, published

ERNIE_SMALL, ERNIE_LARGE, DEEPSEEK = (2560, 64, 6, 27), (8192, 64, 8, 51), (7168, 256, 8, 58)

# (model, ranks): bytes per token of the group and layer of all-reduce, gather of logits + bf16 hidden, gather of ids
# and weights + bf16, the same + fp8, all-to-all bf16, fp8; then KiB over all MoE layers where the source gives them.
WORKED = [
    (ERNIE_SMALL, 2, (5120, 5184, 5150, 3870, 5061, 3797), (135, None, 136, 102, 133, 100)),
    (ERNIE_SMALL, 4, (7680, 7776, 7725, 5805, 6427, 4821), (202, None, 204, 153, 169, 127)),
    (ERNIE_SMALL, 8, (8960, 9072, 9012, 6772, 5083, 3813), (236, None, 238, 179, 134, 101)),
    (ERNIE_SMALL, 16, (9600, 9720, 9656, 7256, 3192, 2394), (253, None, 255, 191, 84, 63)),
    (ERNIE_LARGE, 8, (28672, 28784, 28742, 21574, 19474, 14606), (1428, None, 1431, 1074, 970, 727)),
    (DEEPSEEK, 8, (25088, 25536, 25158, 18886, 16608, 12456), (1421, None, 1425, 1070, 941, 706)),
    (DEEPSEEK, 16, (26880, 27360, 26955, 20235, 10961, 8222), (1522, None, 1527, 1146, 621, 466)),
]
COLUMNS = [
    (Exchange.ALL_REDUCE, Routing.WIDE_IDS),
    (Exchange.GATHER_BF16, Routing.LOGITS),
    (Exchange.GATHER_BF16, Routing.WIDE_IDS),
    (Exchange.GATHER_FP8, Routing.WIDE_IDS),
    (Exchange.ALL_TO_ALL_BF16, Routing.WIDE_IDS),
    (Exchange.ALL_TO_ALL_FP8, Routing.WIDE_IDS),
]


@pytest.mark.parametrize(("model", "ranks", "per_layer", "kibibytes"), WORKED)
def test_worked_numbers(
    model: tuple[int, int, int, int], ranks: int, per_layer: tuple[int, ...], kibibytes: tuple[int | None, ...]
) -> None:
    hidden, experts, top_k, layers = model
    for (exchange, routing), bytes_, kib in zip(COLUMNS, per_layer, kibibytes, strict=True):
        exact = exchange_bytes(exchange, hidden=hidden, experts=experts, top_k=top_k, ranks=ranks, routing=routing)
        assert abs(exact - bytes_) <= Fraction(51, 100), exchange
        # The worked KiB were made from figures rounded before.
        assert kib is None or abs(exact * layers / 1024 - kib) <= 1, exchange


@pytest.mark.parametrize(
    ("routing", "ernie_small", "ernie_large"),
    [(Routing.LOGITS, 128, 128), (Routing.WIDE_IDS, 60, 80), (Routing.IDS, 36, 48), (Routing.NARROW_IDS, 18, 24)],
)
def test_routing_information_of_a_token(routing: Routing, ernie_small: int, ernie_large: int) -> None:
    assert routing_bytes(routing, experts=64, top_k=6) == ernie_small
    assert routing_bytes(routing, experts=64, top_k=8) == ernie_large


def test_an_all_reduce_is_a_reduce_scatter_and_a_gather() -> None:
    for ranks in (1, 2, 5, 8):
        assert all_reduce_bytes(100, ranks) == reduce_scatter_bytes(100, ranks) + gather_bytes(100, ranks)


def test_a_token_with_all_experts_reaches_all_ranks_and_one_with_a_single_expert_its_share() -> None:
    assert remote_ranks(experts=8, top_k=8, ranks=4) == 3
    assert remote_ranks(experts=8, top_k=1, ranks=4) == Fraction(3, 4)


def test_one_card_moves_nothing() -> None:
    for name in (LLAMA_8B, ERNIE_21B):
        assert step_traffic(published(name), Layout()) == ()


def test_tensor_parallel_ernie_reduces_once_for_attention_and_once_for_each_mlp() -> None:
    traffic = {line.name: line for line in step_traffic(published(ERNIE_300B), Layout(8, 1, 8))}
    assert traffic["MoE all-reduce"].bytes_per_token == 51 * 28672
    assert traffic["attention all-reduce"].bytes_per_token == 54 * 28672
    assert traffic["dense MLP all-reduce"].bytes_per_token == 3 * 28672
    assert [line.launches for line in traffic.values()] == [54, 3, 51, 1]


def test_data_parallel_ernie_moves_tokens_to_experts_and_nothing_for_attention() -> None:
    bf16, fp8 = (
        step_traffic(published(ERNIE_21B), Layout(1, 8, 8), fp8_dispatch=fp8_dispatch) for fp8_dispatch in (False, True)
    )
    assert [line.layers for line in bf16] == [27]
    assert bf16[0].bytes_per_token == 27 * 9012.5
    assert fp8[0].bytes_per_token == 27 * 6772.5


def test_prefill_time_on_the_wire_matches_the_worked_example() -> None:
    # 2048 tokens on each of 8 ranks: 290 us for each layer in bf16 and 218 us in fp8, at 510 GB/s.
    card = CARDS["gaudi3"].model_copy(update={"scale_up_bandwidth": 510e9, "alpha_seconds": 0.0})
    for fp8, microseconds in ((False, 290), (True, 218)):
        traffic = step_traffic(published(ERNIE_21B), Layout(1, 8, 8), fp8_dispatch=fp8)
        seconds = step_collective_seconds(card, Layout(1, 8, 8), traffic, tokens=8 * 2048)
        assert seconds / 27 * 1e6 == pytest.approx(microseconds, rel=0.005)


def test_a_group_beyond_one_server_pays_the_scale_out_ports() -> None:
    card = CARDS["gaudi2"]
    inside, outside = (collective_seconds(card, 1e9, ranks=ranks) - card.alpha_seconds for ranks in (8, 16))
    assert outside / inside == pytest.approx(7)
    assert collective_seconds(card, 0, ranks=8) == card.alpha_seconds

"""The layer over a set of ranks is the dense layer: each part in its place, the reduction exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hpu_engine.group.collectives import Alone
from hpu_engine.group.in_process import InProcessGroup, InProcessRank
from hpu_engine.model.moe.combiner import AllReduce, Combiner, LeavePartial, ReduceScatter
from hpu_engine.model.moe.dispatcher import Dispatched, GatherDispatch, NoDispatch
from hpu_engine.model.moe.experts import QuantisedInputExperts, WindowExperts
from hpu_engine.model.moe.layer import MoeLayer
from hpu_engine.model.moe.routing import Routing
from tests.moe.reference import EXPERTS, HIDDEN, RandomMoe, tokens


def assert_is_dense(got: Tensor, moe: RandomMoe, x: Tensor) -> None:
    torch.testing.assert_close(got.double(), moe.dense(x), atol=2e-6, rtol=1e-5)


def build(moe: RandomMoe, way: str, rank: InProcessRank, *, reduces: bool = True) -> MoeLayer:
    match way:
        case "tensor":
            return moe.tensor_parallel(rank, reduces=reduces)
        case "expert":
            return moe.expert_parallel(Alone(), rank, shares_tokens=True, reduces=reduces)
        case "data":
            return moe.expert_parallel(rank, Alone(), shares_tokens=False, reduces=reduces)
    raise ValueError(way)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("way", ["tensor", "expert"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_that_share_tokens_add_up_to_the_dense_layer(way: str, size: int, shared: bool) -> None:
    moe, x = RandomMoe.draw(shared=shared), tokens(37)
    results = InProcessGroup(size).run(lambda rank: build(moe, way, rank)(x))
    for result in results:
        assert_is_dense(result, moe, x)
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_with_tokens_of_their_own_each_get_their_dense_result(size: int, shared: bool) -> None:
    moe = RandomMoe.draw(shared=shared)
    own = [tokens(9, seed=rank) for rank in range(size)]
    results = InProcessGroup(size).run(lambda rank: build(moe, "data", rank)(own[rank.rank]))
    for result, x in zip(results, own, strict=True):
        assert_is_dense(result, moe, x)


@pytest.mark.parametrize("way", ["tensor", "expert"])
@pytest.mark.parametrize("shared", [False, True])
def test_without_reduction_the_partial_sums_of_all_ranks_are_the_dense_layer(way: str, shared: bool) -> None:
    moe, x = RandomMoe.draw(shared=shared), tokens(37)
    group = InProcessGroup(4)
    partial = group.run(lambda rank: build(moe, way, rank, reduces=False)(x))
    assert_is_dense(torch.stack(partial).sum(0), moe, x)
    assert all(rank.calls == [] for rank in group.ranks)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("way", ["tensor", "expert", "data"])
def test_a_missing_or_a_doubled_reduction_is_not_the_dense_layer(way: str, shared: bool) -> None:
    """What would go unseen if these passed: the proof above must be able to fail."""
    moe, x = RandomMoe.draw(shared=shared), tokens(8)

    class Twice:
        reduces = True

        def __init__(self, inner: Combiner, rank: InProcessRank) -> None:
            self.inner, self.rank = inner, rank

        def __call__(self, partial: Tensor) -> Tensor:
            return self.rank.all_reduce(self.inner(partial))

    def doubled(rank: InProcessRank) -> Tensor:
        layer = build(moe, way, rank)
        return replace(layer, combiner=Twice(layer.combiner, rank))(x)

    def missing(rank: InProcessRank) -> Tensor:
        layer = build(moe, way, rank)

        class OwnRowsOnly(LeavePartial):
            reduces = True

            def __call__(self, partial: Tensor) -> Tensor:
                return partial.chunk(2)[rank.rank] if way == "data" else partial

        return replace(layer, combiner=OwnRowsOnly())(x)

    for broken in (doubled, missing):
        for result in InProcessGroup(2).run(broken):
            with pytest.raises(AssertionError):
                assert_is_dense(result, moe, x)


def test_whole_shared_experts_cannot_stand_in_an_unreduced_result() -> None:
    moe = RandomMoe.draw(shared=True)
    with pytest.raises(AssertionError, match="once per rank"):
        moe.expert_parallel(Alone(), Alone(), shares_tokens=True, reduces=False)


@pytest.mark.parametrize("way", ["tensor", "expert", "data"])
def test_all_ranks_issue_the_same_collectives_even_with_nothing_but_padding(way: str) -> None:
    moe = RandomMoe.draw(shared=True)
    group = InProcessGroup(4)

    def work(rank: InProcessRank) -> Tensor:
        real = torch.full((6,), rank.rank % 2 == 0) if way == "data" else torch.ones(6, dtype=torch.bool)
        return build(moe, way, rank)(tokens(6, seed=rank.rank if way == "data" else 0), real)

    group.run(work)
    assert len(group.ranks[0].calls) == (4 if way == "data" else 1)
    assert all(rank.calls == group.ranks[0].calls for rank in group.ranks)


# --- shapes


def quantised(layer: MoeLayer) -> MoeLayer:
    assert isinstance(layer.experts, WindowExperts)
    return replace(layer, experts=QuantisedInputExperts(layer.experts, scale=0.02, largest=240.0))


@pytest.mark.parametrize("change", [lambda layer: layer, quantised], ids=["plain", "quantised"])
@pytest.mark.parametrize("way", ["tensor", "expert", "data"])
@pytest.mark.parametrize("shape", [(6, HIDDEN), (2, 3, HIDDEN), (1, 1, HIDDEN), (0, HIDDEN)])
def test_the_result_has_the_inputs_shape(
    way: str, shape: tuple[int, ...], change: Callable[[MoeLayer], MoeLayer]
) -> None:
    moe = RandomMoe.draw(shared=True)
    rows = shape[0] if len(shape) == 2 else shape[0] * shape[1]
    x = tokens(rows)
    for size in (1, 2):
        results = InProcessGroup(size).run(lambda rank: change(build(moe, way, rank))(x.view(shape)))
        flat = InProcessGroup(size).run(lambda rank: change(build(moe, way, rank))(x))
        for result, other in zip(results, flat, strict=True):
            assert result.shape == shape
            assert torch.equal(result.flatten(), other.flatten())


def test_rows_of_other_ranks_stay_in_an_unreduced_result() -> None:
    moe = RandomMoe.draw(shared=False)
    x = tokens(6).view(2, 3, HIDDEN)
    results = InProcessGroup(2).run(lambda rank: build(moe, "data", rank, reduces=False)(x))
    assert [result.shape for result in results] == [(4, 3, HIDDEN)] * 2


# --- float8 on the wire


@pytest.mark.parametrize("largest", [240.0, 448.0])
def test_float8_dispatch_is_quantise_after_gather_bit_for_bit(largest: float) -> None:
    moe = RandomMoe.draw(shared=False)

    class QuantiseAfterGather(GatherDispatch):
        def __call__(self, x: Tensor, routing: Routing, prepare: Callable[[Tensor], Tensor]) -> Dispatched:
            gathered = super().__call__(x, routing, lambda rows: rows)
            return Dispatched(prepare(gathered.hidden), gathered.routing)

    def work(rank: InProcessRank) -> tuple[Tensor, Tensor]:
        layer = build(moe, "data", rank)
        assert isinstance(layer.experts, WindowExperts)
        narrow = replace(layer, experts=QuantisedInputExperts(layer.experts, scale=0.01, largest=largest))
        x = tokens(9, seed=rank.rank)
        return narrow(x), replace(narrow, dispatcher=QuantiseAfterGather(rank))(x)

    group = InProcessGroup(2)
    for before, after in group.run(work):
        assert torch.equal(before, after)
        assert float(before.abs().amax()) > 0


def test_what_travels_is_float8_and_is_clamped_to_what_the_card_holds() -> None:
    moe = RandomMoe.draw(shared=False)
    experts = moe.expert_parallel(Alone(), Alone(), shares_tokens=True).experts
    assert isinstance(experts, WindowExperts)
    prepared = QuantisedInputExperts(experts, scale=1e-3, largest=240.0).prepare(tokens(16))
    assert prepared.dtype == torch.float8_e4m3fn
    assert float(prepared.float().abs().amax()) == 240.0


# --- padding


@pytest.mark.parametrize("way", ["tensor", "expert", "data"])
def test_padding_rows_come_out_as_zero_and_change_nothing(way: str) -> None:
    moe = RandomMoe.draw(shared=True)
    x, is_real = tokens(10), torch.tensor([True] * 7 + [False] * 3)
    poisoned = x.masked_fill(~is_real[:, None], 1e30)
    for size in (1, 2):
        results = InProcessGroup(size).run(lambda rank: build(moe, way, rank)(poisoned, is_real))
        for result in results:
            assert_is_dense(result[:7], moe, x[:7])
            assert torch.count_nonzero(result[7:]) == 0


def test_the_combiner_alone_reduces() -> None:
    """Parts in isolation issue no reduction: the dispatcher gathers, the experts compute."""
    moe = RandomMoe.draw(shared=True)
    group = InProcessGroup(2)

    def work(rank: InProcessRank) -> None:
        layer = build(moe, "data", rank)
        x = tokens(4)
        dispatched = layer.dispatcher(x, layer.router(x), layer.experts.prepare)
        layer.experts(dispatched, x.dtype)

    group.run(work)
    assert {name for name, _ in group.ranks[0].calls} == {"all_gather"}
    assert isinstance(build(moe, "expert", group.ranks[0]).dispatcher, NoDispatch)
    assert isinstance(build(moe, "expert", group.ranks[0]).combiner, AllReduce)
    assert isinstance(build(moe, "data", group.ranks[0]).combiner, ReduceScatter)
    assert EXPERTS % group.size == 0

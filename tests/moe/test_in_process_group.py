"""The in-process set of ranks behaves as collectives do, and says so where they would hang."""

from __future__ import annotations

import pytest
import torch

from hpu_engine.group.in_process import InProcessGroup, InProcessRank, UnpairedCollective


def test_reductions_add_in_rank_order_and_gathers_keep_it() -> None:
    def work(rank: InProcessRank) -> tuple[list[float], list[float], list[float]]:
        own = torch.arange(4.0) + 10 * rank.rank
        return rank.all_reduce(own).tolist(), rank.all_gather(own[:1]).tolist(), rank.reduce_scatter(own).tolist()

    first, second = InProcessGroup(2).run(work)
    assert first == ([10, 12, 14, 16], [0, 10], [10, 12])
    assert second == ([10, 12, 14, 16], [0, 10], [14, 16])


def test_a_rank_that_stays_away_is_an_error_not_a_hang() -> None:
    def work(rank: InProcessRank) -> None:
        if rank.rank == 0:
            rank.all_reduce(torch.ones(1))

    with pytest.raises(UnpairedCollective, match="did not come"):
        InProcessGroup(2, timeout_seconds=0.5).run(work)


def test_different_calls_or_shapes_at_the_same_time_are_an_error() -> None:
    def calls(rank: InProcessRank) -> None:
        (rank.all_reduce if rank.rank else rank.reduce_scatter)(torch.ones(2))

    def shapes(rank: InProcessRank) -> None:
        rank.all_reduce(torch.ones(2 + rank.rank))

    for work in (calls, shapes):
        with pytest.raises(UnpairedCollective):
            InProcessGroup(2, timeout_seconds=60).run(work)


def test_what_a_rank_raises_is_raised_and_the_others_are_let_go() -> None:
    def work(rank: InProcessRank) -> None:
        if rank.rank == 1:
            raise KeyError("mine")
        rank.all_reduce(torch.ones(1))

    with pytest.raises(KeyError, match="mine"):
        InProcessGroup(3, timeout_seconds=30).run(work)

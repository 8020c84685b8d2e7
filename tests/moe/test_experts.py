"""Both kernels compute the same sum; windows tile the experts; pieces change no bit; a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from hpu_engine.device.cpu.expert_kernels import sorted_kernel, static_kernel
from hpu_engine.model.moe.dispatcher import Dispatched
from hpu_engine.model.moe.experts import WindowExperts
from hpu_engine.model.moe.router import select
from hpu_engine.model.moe.window import ExpertWindow, expert_window
from hpu_engine.planning.violations import PlanError
from tests.moe.reference import EXPERTS, RandomMoe, tokens


@pytest.mark.parametrize("window", [ExpertWindow(0, EXPERTS - 1), ExpertWindow(2, 4), ExpertWindow(7, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_the_static_form_equals_the_sorted_one(window: ExpertWindow, dtype: torch.dtype, rows: int) -> None:
    moe, x = RandomMoe.draw(shared=False, dtype=dtype), tokens(rows, dtype=dtype)
    experts = [moe.expert(index) for index in range(window.first, window.last + 1)]
    dispatched = Dispatched(x, moe.route()(x))
    by_sorting = WindowExperts(window, sorted_kernel(experts))(dispatched, torch.float32)
    masked = WindowExperts(window, static_kernel(experts))(dispatched, torch.float32)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(by_sorting, masked, atol=tolerance, rtol=tolerance)
    assert by_sorting.shape == (rows, x.shape[1])


def test_windows_are_disjoint_and_cover_every_expert() -> None:
    for experts in (1, 8, 60, 64):
        for ranks in (n for n in range(1, experts + 1) if experts % n == 0):
            held = [
                expert
                for rank in range(ranks)
                for expert in range(experts)
                if expert in expert_window(experts, ranks, rank)
            ]
            assert sorted(held) == list(range(experts))


@pytest.mark.parametrize(("experts", "ranks", "nearest"), [(64, 6, (4, 8)), (60, 8, (6, 10)), (8, 9, (8,))])
def test_an_uneven_split_is_refused_with_the_nearest_sizes(experts: int, ranks: int, nearest: tuple[int, ...]) -> None:
    with pytest.raises(PlanError) as refused:
        expert_window(experts, ranks, 0)
    assert set(refused.value.violations[0].nearest) == set(nearest)
    assert str(experts) in str(refused.value)


def test_pieces_of_any_size_give_the_same_bits() -> None:
    moe, x = RandomMoe.draw(shared=False), tokens(50)
    dispatched = Dispatched(x, moe.route()(x))
    window = ExpertWindow(0, EXPERTS - 1)
    # The static form multiplies all rows of a piece at once, so row counts are chosen where products are row-exact.
    whole = WindowExperts(window, static_kernel([moe.expert(i) for i in range(EXPERTS)]), 50)(dispatched, torch.float32)
    for chunk in (2, 10, 25, 49, 1000):
        pieces = WindowExperts(window, moe.kernel(window), chunk)(dispatched, torch.float32)
        torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-6)


def test_no_piece_is_larger_than_asked_for() -> None:
    seen: list[int] = []

    def kernel(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert hidden.shape[0] == ids.shape[0] == weights.shape[0]
        seen.append(hidden.shape[0])
        return torch.zeros(hidden.shape)

    moe, x = RandomMoe.draw(shared=False), tokens(50)
    WindowExperts(ExpertWindow(0, EXPERTS - 1), kernel, 16)(Dispatched(x, moe.route()(x)), torch.float32)
    assert seen == [16, 16, 16, 2]


def test_a_rows_sum_is_taken_in_the_order_of_experts_whatever_its_neighbours() -> None:
    """Linears that compute row by row, so that only the order of the accumulation is left to differ."""
    moe = RandomMoe.draw(shared=False)

    def row_exact(index: int) -> tuple[torch.nn.Module, torch.nn.Module]:
        class Rows(torch.nn.Module):
            def __init__(self, weight: torch.Tensor) -> None:
                super().__init__()
                self.matrix = weight.clone()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.stack([self.matrix @ row for row in x])

        return Rows(moe.gate_up[index]), Rows(moe.down[index])

    kernel = sorted_kernel([row_exact(index) for index in range(EXPERTS)])
    x = tokens(24)
    routing = select(moe.route().logits(x), moe.rule, moe.correction, x.dtype)
    together = kernel(x, routing.ids, routing.weights)
    for row in range(24):
        here = slice(row, row + 1)
        assert torch.equal(kernel(x[here], routing.ids[here], routing.weights[here])[0], together[row])

"""With `exact`, which requests share a step, how a prompt is chunked, what was preempted or cached changes no bit.

On every processor: where its kernels depend on the number of rows, the device finds row counts that do not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hpu_engine.device.cpu.exact_rows import EDGES, ExactLinear, RowClass, find_row_class
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.worker.start_up import Rank
from tests.engine.direct import NARROW, open_quietly
from tests.engine.trace import Asked, Schedule, first_difference, one_at_a_time, random_trace, replay
from tests.models.smollm2 import smollm2
from tests.models.tiny import tiny

BLOCK = 16
VOCAB = 320


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def rank(request: pytest.FixtureRequest) -> Rank:
    """A tiny model, computed in the type itself even where the device would widen it."""
    path = str(tiny("llama", dtype=request.param))
    config = EngineConfig(model=path, dtype=request.param, block_size=BLOCK, num_kv_blocks=40, exact=True)
    opened = open_quietly(config, NARROW)
    assert opened.loaded.dtype == request.param
    return opened


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_changes_a_bit_of_any_logit(rank: Rank, seed: int) -> None:
    asked = random_trace(seed, VOCAB, BLOCK)
    expected = one_at_a_time(rank, asked, num_blocks=40)
    chance = random.Random(seed)
    longest = max(len(one.prompt) + one.params.max_tokens for one in asked)
    tight = -(-longest // BLOCK) + chance.randint(0, 2)
    for schedule in (
        Schedule(budget=BLOCK * 4, num_blocks=40),
        Schedule(budget=chance.choice([1, BLOCK - 1, BLOCK, BLOCK + 1]), num_blocks=tight),
        Schedule(budget=200, num_blocks=tight, max_num_seqs=chance.randint(1, 4), prefix_cache=False),
    ):
        difference = first_difference(expected, replay(rank, asked, schedule))
        assert difference is None, f"trace {seed}, {schedule}: {difference}"


@pytest.mark.parametrize(("threads", "width"), [(3, 1024), (5, 1536), (2, 1000)])
def test_how_work_is_cut_among_threads_changes_no_bit(threads: int, width: int) -> None:
    """Element by element work of many rows is cut among threads where it falls, one row's is not cut at all."""
    lengths = (40, 99, 130, 57)
    prompts = [tuple(3 + (i * 37 + n) % (VOCAB - 5) for i in range(length)) for n, length in enumerate(lengths)]
    params = SamplingParams(max_tokens=3, temperature=0.0)
    asked = [Asked(f"r{n}", prompt, params, arrives_at_step=n) for n, prompt in enumerate(prompts)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        path = str(tiny("llama", intermediate_size=width))
        rank = open_quietly(EngineConfig(model=path, block_size=BLOCK, num_kv_blocks=40, exact=True))
        expected = one_at_a_time(rank, asked, num_blocks=40)
        for budget in (256, 70):
            assert first_difference(expected, replay(rank, asked, Schedule(budget=budget, num_blocks=40))) is None
    finally:
        torch.set_num_threads(before)


def test_the_fuzzer_sees_preemption_and_prefix_hits(rank: Rank) -> None:
    """A trace without them would prove little."""
    asked = [
        Asked(f"r{n}", tuple(range(3, 3 + 2 * BLOCK)), SamplingParams(max_tokens=40, temperature=0.0), n)
        for n in range(4)
    ]
    found = replay(rank, asked, Schedule(budget=64, num_blocks=6))
    assert found.preemptions > 0
    assert found.prefix_hits > 0
    assert first_difference(one_at_a_time(rank, asked, num_blocks=40), found) is None


def test_decoding_equals_prefilling_again_at_every_position(rank: Rank) -> None:
    for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        prompt = tuple(3 + (7 * i + length) % 300 for i in range(length))
        one = Asked("decoded", prompt, SamplingParams(max_tokens=BLOCK + 2, temperature=0.0))
        decoded = one_at_a_time(rank, [one], num_blocks=40)
        for number in range(BLOCK + 2):
            whole = prompt + tuple(decoded.tokens["decoded"][:number])
            again = Asked("again", whole, SamplingParams(max_tokens=1, temperature=0.0))
            prefilled = one_at_a_time(rank, [again], num_blocks=40)
            assert torch.equal(prefilled.logits["again", 0], decoded.logits["decoded", number]), (length, number)


@pytest.mark.timeout(1200)
def test_a_real_model_is_exact_too() -> None:
    opened = open_quietly(EngineConfig(model=str(smollm2()), num_kv_blocks=12, exact=True))
    prompts = [tuple(100 + (i * 37 + n) % 40000 for i in range(length)) for n, length in enumerate((3, 127, 129, 200))]
    asked = [
        Asked(f"r{n}", prompt, SamplingParams(max_tokens=6, temperature=0.0), n) for n, prompt in enumerate(prompts)
    ]
    expected = one_at_a_time(opened, asked, num_blocks=12)
    for schedule in (Schedule(budget=256, num_blocks=12), Schedule(budget=70, num_blocks=3)):
        difference = first_difference(expected, replay(opened, asked, schedule))
        assert difference is None, f"{schedule}: {difference}"


def processor(boundaries: tuple[int, ...], weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A linear that, like a library, adds in another order in each class of row counts."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        split = 8 * (1 + sum(x.shape[0] >= boundary for boundary in boundaries))
        # Row by row, so that this machine's own kernels add no classes of theirs.
        return torch.cat(
            [
                F.linear(row[:, :split], weight[:, :split]) + F.linear(row[:, split:], weight[:, split:])
                for row in torch.split(x, 1)
            ]
        )

    return apply


@pytest.mark.parametrize(
    ("boundaries", "expected"),
    [
        pytest.param((), RowClass(1, 256), id="all-alike"),
        pytest.param((2,), RowClass(2, 256), id="one-row-is-special"),
        pytest.param((4,), RowClass(4, 256), id="up-to-three-rows-are-special"),
        pytest.param((33,), RowClass(1, 32), id="tiles-of-32-rows"),
        pytest.param((2, 33, 40), RowClass(2, 32), id="both"),
        pytest.param((256,), RowClass(1, 32), id="the-last-count-is-special"),
    ],
)
def test_the_row_counts_that_are_treated_alike_are_found(boundaries: tuple[int, ...], expected: RowClass) -> None:
    assert find_row_class(partial(processor, boundaries), (64, 96), torch.float32) == expected
    exactly = ExactLinear(processor(boundaries, torch.randn(64, 96)), expected)
    x = torch.randn(300, 96, generator=torch.Generator().manual_seed(2))
    whole = exactly(x)
    for count in (*EDGES[::5], 300):
        assert torch.equal(exactly(x[:count]), whole[:count]), count


def test_where_the_place_of_a_row_matters_rows_are_taken_one_by_one() -> None:
    def build(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x + torch.arange(x.shape[0])[:, None] * 1e-3

    assert find_row_class(build, (8, 8), torch.float32) == RowClass(1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_sum_in_another_order_is_seen(dtype: torch.dtype) -> None:
    """A kernel that takes the two halves of a single row apart: random numbers hardly show it in bfloat16."""

    def build(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        wide = weight.float()

        def apply(x: torch.Tensor) -> torch.Tensor:
            rows = torch.split(x.float(), 1)
            if len(rows) > 1:
                return torch.cat([row @ wide.T for row in rows]).to(dtype)
            return (rows[0][:, :32] @ wide[:, :32].T + rows[0][:, 32:] @ wide[:, 32:].T).to(dtype)

        return apply

    assert find_row_class(build, (64, 64), dtype).least > 1

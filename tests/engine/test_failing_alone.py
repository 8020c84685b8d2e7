"""A failing request fails alone: the others of its step get their tokens, and the loop goes on."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.scheduling.kv_blocks import BlockPool
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Limits, Scheduler
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.step import loop as loop_module
from hpu_engine.step.input import StepInput
from hpu_engine.step.loop import StepLoop, TakeScores
from hpu_engine.step.sampler import Draw, Sampled, SamplingFailed, sample
from hpu_engine.step.shapes import FirstSeen, ShapeMap, StepShapes
from hpu_engine.wire.messages import Submit
from tests.engine.direct import open_quietly, run_together
from tests.models.tiny import tiny

VOCAB, BLOCK = 11, 4
BAD_SEED = 666


class Runner:
    """Logits that only say which rows there are."""

    vocab = VOCAB

    def __init__(self) -> None:
        self.shapes, self.first_seen = ShapeMap(BLOCK), FirstSeen()
        self.shape: str | None = None
        self.poison_row: int | None = None

    def run(self, step: StepInput, shapes: StepShapes, take_scores: TakeScores) -> Tensor:
        for piece in shapes.scores:
            take_scores(self._logits(piece.count), piece.count)
        return self._logits(shapes.outputs.count)

    def _logits(self, rows: int) -> Tensor:
        logits = torch.zeros(rows, VOCAB)
        if self.poison_row is not None and self.poison_row < rows:
            logits[self.poison_row] = float("nan")
        return logits


def started(runner: Runner) -> StepLoop:
    loop = StepLoop(Scheduler(Limits(64, 8, 100), BlockPool(20, BLOCK)), runner)
    for name, seed in (("a", 1), ("bad", BAD_SEED), ("c", 3)):
        params = SamplingParams(max_tokens=3, seed=seed)
        assert loop.submit(Submit(request_id=name, prompt_token_ids=(1, 2), params=params)) is None
    return loop


def finish(loop: StepLoop) -> dict[str, int]:
    counts: dict[str, int] = {}
    while loop.has_work:
        for row in loop.step().outputs:
            counts[row.request_id] = counts.get(row.request_id, 0) + len(row.token_ids)
        loop.scheduler.check_integrity()
    return counts


def test_a_row_whose_logits_are_no_numbers_is_ended_with_an_internal_error() -> None:
    runner = Runner()
    loop = started(runner)
    runner.poison_row = 1
    result = loop.step()
    runner.poison_row = None
    assert [(one.request_id, one.internal) for one in result.rejected] == [("bad", True)]
    assert [row.request_id for row in result.outputs] == ["a", "c"]
    assert finish(loop) == {"a": 2, "c": 2}
    assert loop.scheduler.pool.num_used == 0


def test_an_exception_in_one_rows_sampling_ends_only_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample_or_raise(logits: Tensor, draws: list[Draw]) -> list[Sampled | SamplingFailed]:
        if any(draw.seed == BAD_SEED for draw in draws):
            raise ZeroDivisionError("an own mistake")
        return sample(logits, draws)

    monkeypatch.setattr(loop_module, "sample", sample_or_raise)
    loop = started(Runner())
    result = loop.step()
    assert [one.request_id for one in result.rejected] == ["bad"]
    assert "ZeroDivisionError" in result.rejected[0].message
    assert finish(loop) == {"a": 2, "c": 2}


def submit_five(loop: StepLoop, scores: int | None) -> None:
    params = SamplingParams(max_tokens=3, seed=1, prompt_logprobs=scores)
    assert loop.submit(Submit(request_id="five", prompt_token_ids=(1, 2, 3, 4, 5), params=params)) is None


def test_a_prompt_that_cannot_be_scored_ends_only_that_request() -> None:
    loop = started(Runner())
    # More likely tokens than there are tokens: the server refuses it, and where it came through it must not end a rank.
    submit_five(loop, scores=VOCAB + 1)
    result = loop.step()
    assert [(one.request_id, one.internal) for one in result.rejected] == [("five", True)]
    assert "could not be scored" in result.rejected[0].message
    assert [row.request_id for row in result.outputs] == ["a", "bad", "c"]
    assert finish(loop) == {"a": 2, "bad": 2, "c": 2}
    assert loop.scheduler.pool.num_used == 0


@pytest.mark.parametrize("row", [2, 0], ids=["only scored", "scored and drawn from"])
def test_scores_that_are_no_numbers_are_an_internal_error_and_no_part_of_them_is_reported(row: int) -> None:
    runner = Runner()
    loop = StepLoop(Scheduler(Limits(64, 8, 100), BlockPool(20, BLOCK)), runner)
    submit_five(loop, scores=0)
    runner.poison_row = row
    result = loop.step()
    assert [(one.request_id, one.internal) for one in result.rejected] == [("five", True)]
    assert "not finite" in result.rejected[0].message
    assert (result.outputs, loop.has_work, loop.scheduler.pool.num_used) == ((), False, 0)
    loop.scheduler.check_integrity()
    runner.poison_row = None
    submit_five(loop, scores=None)
    assert finish(loop) == {"five": 3}
    assert loop.scheduler.counters.prefix_hits == 0, "what a failed request computed is not shared"


@pytest.mark.parametrize("mode", [{}, {"exact": True}, {"force_buckets": True}, {"compile": True}], ids=str)
def test_numbers_that_a_broken_request_left_in_its_pages_reach_nobody(mode: dict[str, bool]) -> None:
    """Pages are handed on as they are; what is masked is still multiplied, and 0 times NaN is NaN."""
    config = EngineConfig(model=str(tiny("llama")), block_size=BLOCK, num_kv_blocks=20)
    rank = open_quietly(msgspec.structs.replace(config, **mode))
    prompts = [[5, 6, 7], list(range(3, 3 + 2 * BLOCK)), [9], list(range(20, 20 + 3 * BLOCK - 1))]
    params = SamplingParams(max_tokens=2 * BLOCK + 1, temperature=0.0)
    expected = run_together(rank, prompts, params)
    for cache in rank.runner.caches:
        assert isinstance(cache, LayerPages)
        cache.keys[1:].fill_(float("nan"))
        cache.values[1:].fill_(float("nan"))
    rank.loop.scheduler.pool = BlockPool(20, BLOCK)
    assert run_together(rank, prompts, params) == expected

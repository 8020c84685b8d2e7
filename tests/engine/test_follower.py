"""A step carries all that a worker needs: one that knows no request computes the bits of one that does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor

from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.step.input import RowInput, StepInput, output_of
from hpu_engine.step.loop import StepLoop, TakeScores
from hpu_engine.step.shapes import StepShapes
from hpu_engine.worker.start_up import Rank
from tests.engine.direct import open_quietly, run_together
from tests.engine.follower import run
from tests.engine.trace import Schedule, random_trace, replay
from tests.models.tiny import VOCAB_SIZE, tiny

BLOCK, BLOCKS = 16, 40


class Watched:
    """What a rank's runner was given, each step as it would travel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: Rank) -> None:
        self.steps: list[bytes] = []
        self.emitting: list[str] = []
        whole = type(rank.runner).run

        def watched(runner: object, step: StepInput, shapes: StepShapes, take_scores: TakeScores) -> Tensor:
            self.steps.append(step.encode())
            return whole(runner, step, shapes, take_scores)  # type: ignore[arg-type]

        monkeypatch.setattr(type(rank.runner), "run", watched)


def referring_back(steps: list[StepInput]) -> list[StepInput]:
    """The same steps of greedy rows, each token that is an output of the step before named as such."""
    made, before = [], StepInput()
    for step in steps:
        places = {
            (tuple(row.blocks[:1]), row.context_len + row.new_len): place
            for place, row in enumerate(row for row in before.rows if row.emits)
        }

        def named(row: RowInput, places: dict[tuple[tuple[int, ...], int], int] = places) -> RowInput:
            place = places.get((tuple(row.blocks[:1]), row.context_len)) if row.new_len == 1 else None
            return row if place is None else row._replace(token_ids=[output_of(place)])

        made.append(StepInput(tuple(map(named, step.rows))))
        before = step
    return made


@pytest.mark.parametrize(("family", "padded"), [("llama", False), ("mixtral", True)], ids=["own shapes", "buckets"])
def test_a_follower_runs_a_whole_trace_from_wire_steps_alone(
    family: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, prefix hits, prompt scores, preemption; tokens, and in their place references to outputs."""
    monkeypatch.setattr("hpu_engine.device.cpu.linear_kernels._fastest_first", in_order)
    config = EngineConfig(
        model=str(tiny(family)), block_size=BLOCK, num_kv_blocks=BLOCKS, max_model_len=512, force_buckets=padded
    )
    leader = open_quietly(config)
    watched = Watched(monkeypatch, leader)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1)
    asked = [replace(one, params=greedy, aborted_at_step=None) for one in random_trace(3, VOCAB_SIZE, BLOCK)]
    replay(leader, asked, Schedule(40, BLOCKS, max_num_seqs=4))
    monkeypatch.undo()
    monkeypatch.setattr("hpu_engine.device.cpu.linear_kernels._fastest_first", in_order)
    steps = [StepInput.decode(frame) for frame in watched.steps]
    expected = [run(leader.runner, step) for step in steps]
    travelling = referring_back(steps)
    assert sum(step.refers_back for step in travelling) > 10
    follower = subprocess.Popen(
        [sys.executable, "-c", IN_ORDER, msgspec.json.encode(config).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    frames = b"".join(len(frame).to_bytes(4, "big") + frame for frame in (step.encode() for step in travelling))
    said, _ = follower.communicate(frames, timeout=120)
    found = [(line.split()[0], list(map(int, line.split()[1:]))) for line in said.decode().splitlines()]
    assert found == expected


def in_order(weight: Tensor, bias: Tensor | None) -> object:
    """Kernels are chosen by their time; here both sides take the same ones."""
    from hpu_engine.device.cpu.linear_kernels import KERNELS

    return KERNELS


IN_ORDER = (
    "from hpu_engine.device.cpu import linear_kernels; from tests.engine import follower, test_follower;"
    "linear_kernels._fastest_first = test_follower.in_order; follower.main()"
)


def test_an_idle_rank_joins_a_step_and_leaves_no_trace() -> None:
    """It runs the shapes that the others need on padding alone: no token, no block, no counter, nothing but scratch."""
    config = EngineConfig(model=str(tiny("mixtral")), block_size=BLOCK, num_kv_blocks=BLOCKS, force_buckets=True)
    busy, idle = open_quietly(config), open_quietly(config)
    asked: list[StepShapes] = []

    def noted(shapes: StepShapes) -> StepShapes:
        asked.append(shapes)
        return shapes

    first = StepLoop(busy.loop.scheduler, busy.runner, noted)
    prompts, params = [[5] * 50, [6, 7]], SamplingParams(temperature=0.0, max_tokens=4)
    run_together(replace(busy, loop=first), prompts, params)
    assert len(asked) >= 4
    ran: list[str | None] = []
    for shapes in asked:
        loop = StepLoop(idle.loop.scheduler, idle.runner, lambda own, agreed=shapes: agreed)  # type: ignore[misc]
        result = loop.step()
        assert (result.outputs, result.rejected, result.begun, result.num_tokens) == ((), (), (), 0)
        ran.append(idle.runner.shape)
    assert ran == [str(shapes) for shapes in asked]
    assert idle.loop.scheduler.pool.num_used == 0
    for cache in idle.runner.caches:
        assert isinstance(cache, LayerPages)
        assert not cache.keys.any()
        assert not cache.values.any()
    assert run_together(idle, prompts, params) == run_together(busy, prompts, params)


def test_without_work_anywhere_nothing_runs() -> None:
    rank = open_quietly(EngineConfig(model=str(tiny("llama")), block_size=BLOCK, num_kv_blocks=BLOCKS))
    result = rank.loop.step()
    assert (result.outputs, result.num_tokens, rank.loop.steps, rank.runner.shape) == ((), 0, 0, None)


def test_an_output_is_resolved_where_the_step_runs() -> None:
    """In both forms of a batch; other tokens are left alone."""
    for forced in (False, True):
        config = EngineConfig(model=str(tiny("llama")), block_size=BLOCK, num_kv_blocks=BLOCKS, force_buckets=forced)
        runner = open_quietly(config).runner
        first, chunk, last = (RowInput(ids, [ids[0]], 0, emits=True) for ids in ([9], [4, 4], [7]))
        plain = StepInput((first, chunk, last))
        told = StepInput((first._replace(token_ids=[output_of(1)]), chunk, last._replace(token_ids=[output_of(0)])))
        expected = runner.run(plain, runner.shapes.of(plain))[:3].clone()
        runner.outputs = torch.tensor([7, 9])
        assert torch.equal(runner.run(told, runner.shapes.of(told))[:3], expected)

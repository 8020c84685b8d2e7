"""A request's counts are those of its tokens at every step, whatever happens to it in between."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from hpu_engine.scheduling.kv_blocks import BlockPool
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Limits, Scheduler
from hpu_engine.scheduling.token_counts import TokenCounts
from hpu_engine.step.input import StepInput
from hpu_engine.step.loop import StepLoop, TakeScores
from hpu_engine.step.shapes import FirstSeen, ShapeMap, StepShapes
from hpu_engine.wire.messages import Submit


class Runner:
    """Every token is as likely as every other."""

    vocab, block_size = 30, 4

    def __init__(self) -> None:
        self.shapes, self.first_seen = ShapeMap(self.block_size), FirstSeen()
        self.shape: str | None = None

    def run(self, step: StepInput, shapes: StepShapes, take_scores: TakeScores) -> Tensor:
        return torch.zeros(shapes.outputs.count, self.vocab)


def test_counts_begin_with_the_prompt_and_follow_the_output() -> None:
    tokens = [7, 3, 7]
    counts = TokenCounts()
    counts.count(tokens, 3)
    assert (list(counts.ids), list(counts.times)) == ([7, 3], [0, 0])
    counts.count(tokens, 3)
    tokens += [3, 9, 3]
    counts.count(tokens, 3)
    assert (list(counts.ids), list(counts.times)) == ([7, 3, 9], [0, 2, 1])


def outputs_of(num_blocks: int) -> tuple[dict[str, list[int]], int]:
    """With a penalty that lets no token come twice; and how many requests were preempted meanwhile."""
    loop = StepLoop(Scheduler(Limits(64, 8, 100), BlockPool(num_blocks, Runner.block_size)), Runner())
    for seed, name in enumerate("abc"):
        params = SamplingParams(max_tokens=20, temperature=0.01, seed=seed, presence_penalty=2.0)
        assert loop.submit(Submit(request_id=name, prompt_token_ids=(1, 2, 1, seed), params=params)) is None
    outputs: dict[str, list[int]] = {name: [] for name in "abc"}
    while loop.has_work:
        before = {request.request_id: list(request.tokens) for request in loop.scheduler.live_requests}
        requests = {request.request_id: request for request in loop.scheduler.live_requests}
        for row in loop.step().outputs:
            counts, tokens = requests[row.request_id].counts, before[row.request_id]
            assert sorted(counts.ids) == sorted(set(tokens))
            assert {token: times for token, times in zip(counts.ids, counts.times, strict=True) if times} == Counter(
                tokens[4:]
            )
            outputs[row.request_id].extend(row.token_ids)
    return outputs, loop.scheduler.counters.preemptions


def test_a_preempted_request_keeps_its_counts() -> None:
    outputs, preemptions = outputs_of(num_blocks=9)
    assert preemptions > 0
    assert (outputs, 0) == outputs_of(num_blocks=40)
    assert all(len(set(output)) == 20 for output in outputs.values()), "a token came twice"

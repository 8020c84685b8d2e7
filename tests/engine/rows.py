"""Steps of made-up requests, and what a step is made into."""

from __future__ import annotations

from torch import Tensor

from hpu_engine.device.cpu.device import CpuDevice
from hpu_engine.model.runner import ModelRunner
from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Row, Step
from hpu_engine.step.batch import Batch, build_batch
from hpu_engine.step.input import input_of

GREEDY = SamplingParams(temperature=0.0)
PUT = CpuDevice().put


def batch_of(step: Step, block_size: int) -> Batch:
    return build_batch(input_of(step.rows, block_size), block_size, PUT)


def run_step(runner: ModelRunner, step: Step) -> Tensor:
    """Logits [emitting rows, vocab] of a step that no scheduler made."""
    given = input_of(step.rows, runner.shapes.block_size)
    return runner.run(given, runner.shapes.of(given))


def rows_of(count: int, context_len: int, new_len: int, block_size: int) -> Step:
    """`count` rows, each with blocks of its own; lengths differ by a few tokens like those of real requests."""
    rows, next_block = [], 1
    for index in range(count):
        context = max(0, context_len - index % 7)
        request = Request(str(index), [1 + index % 50] * (context + new_len), GREEDY, seed=0)
        needed = -(-(context + new_len) // block_size)
        request.blocks = list(range(next_block, next_block + needed))
        next_block += needed
        rows.append(Row(request, context, new_len, emits=True))
    return Step(tuple(rows))

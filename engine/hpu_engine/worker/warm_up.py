"""Runs what a rank will run, once, before it serves: every bucket, or a few shapes where shapes are exact.

Each run is a whole step, from its input to its tokens, of padding or scratch alone: nothing else is read or written. It
is reported before it starts, so that whoever waits, or looks for the reason of a death, knows what was running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpu_engine.contract import Phase
from hpu_engine.device.base import WarmUpShape
from hpu_engine.model.runner import ModelRunner
from hpu_engine.planning.shapes.buckets import Bucket, BucketSet
from hpu_engine.planning.shapes.limits import Kind
from hpu_engine.planning.shapes.warm_up_plan import warm_up_order
from hpu_engine.scheduling.kv_blocks import SCRATCH_BLOCK
from hpu_engine.step.input import RowInput, StepInput
from hpu_engine.step.loop import PADDING
from hpu_engine.step.sampler import sample
from hpu_engine.step.shapes import Fit, StepShapes
from hpu_engine.wire.messages import Progress

OnProgress = Callable[[Progress], None]


def run_buckets(runner: ModelRunner, buckets: BucketSet, on_progress: OnProgress) -> int:
    """Every bucket, largest estimated cost first. Returns how many there are."""
    order = warm_up_order(buckets)
    return _run([(str(bucket), StepInput(), step_with(bucket, buckets)) for bucket in order], runner, on_progress)


def run_shapes(runner: ModelRunner, shapes: Sequence[WarmUpShape], on_progress: OnProgress) -> int:
    """Steps of these shapes, in their order. Returns how many there are."""
    steps = [(str(shape), _scratch_step(shape, runner.shapes.block_size)) for shape in shapes]
    return _run([(name, step, runner.shapes.of(step)) for name, step in steps], runner, on_progress)


def step_with(bucket: Bucket, buckets: BucketSet) -> StepShapes:
    """A step that runs `bucket`, and of the other kinds only what no step is without: some tokens."""
    flat = bucket if bucket.kind is Kind.FLAT else buckets.of(Kind.FLAT)[0]

    def where(kind: Kind) -> tuple[Fit, ...]:
        return (Fit(0, bucket.size),) if bucket.kind is kind else ()

    outputs = where(Kind.SAMPLER) or (Fit(0, (0, 0)),)
    return StepShapes(Fit(0, flat.size), where(Kind.PREFILL), where(Kind.DECODE), outputs[0], scores=())


@torch.inference_mode()
def _run(steps: Sequence[tuple[str, StepInput, StepShapes]], runner: ModelRunner, on_progress: OnProgress) -> int:
    for done, (name, step, shapes) in enumerate(steps):
        on_progress(Progress(phase=Phase.WARMING_UP, done=done, total=len(steps), current=name))
        logits = runner.run(step, shapes)
        if logits.shape[0]:
            sample(logits, [PADDING] * logits.shape[0])
    return len(steps)


def _scratch_step(shape: WarmUpShape, block_size: int) -> StepInput:
    chunks = [_scratch_row(shape.context_len, shape.chunk_len, block_size)] * shape.chunks
    singles = [_scratch_row(shape.context_len, 1, block_size)] * shape.singles
    return StepInput((*chunks, *singles))


def _scratch_row(context_len: int, new_len: int, block_size: int) -> RowInput:
    blocks = [SCRATCH_BLOCK] * -(-(context_len + new_len) // block_size)
    return RowInput([0] * new_len, blocks, context_len, emits=True)

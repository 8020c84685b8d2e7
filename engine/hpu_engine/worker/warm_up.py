"""Runs what a rank will run, once, before it serves: every bucket, or a few shapes where shapes are exact.

Only scratch is read and written. Each run is reported before it starts, so that whoever waits, or looks for the reason
of a death, knows what was running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpu_engine.contract import Phase
from hpu_engine.device.base import WarmUpShape
from hpu_engine.model.runner import ModelRunner
from hpu_engine.planning.shapes.buckets import Bucket, BucketSet
from hpu_engine.planning.shapes.limits import Kind, StepLimits
from hpu_engine.planning.shapes.warm_up_plan import warm_up_order
from hpu_engine.scheduling.kv_blocks import SCRATCH_BLOCK
from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Row, Step
from hpu_engine.step.batch import build_batch
from hpu_engine.step.padded_batch import build_padded_batch
from hpu_engine.step.sampler import Draw, sample
from hpu_engine.step.shapes import FirstSeen, Fit, Recipe, ShapeMap, StepShapes, Variant
from hpu_engine.wire.messages import Progress

OnProgress = Callable[[Progress], None]

GREEDY = SamplingParams(temperature=0.0)
GENERAL = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, repetition_penalty=1.1, logprobs=1)


@torch.inference_mode()
def run_buckets(runner: ModelRunner, buckets: BucketSet, seen: FirstSeen, on_progress: OnProgress) -> int:
    """Every bucket, largest estimated cost first. Returns how many there are."""
    order = warm_up_order(buckets)
    for done, bucket in enumerate(order):
        on_progress(Progress(phase=Phase.WARMING_UP, done=done, total=len(order), current=str(bucket)))
        seen.see(_run_bucket(runner, bucket, buckets.limits))
    return len(order)


@torch.inference_mode()
def run_shapes(
    runner: ModelRunner, shapes: Sequence[WarmUpShape], shape_map: ShapeMap, seen: FirstSeen, on_progress: OnProgress
) -> int:
    """Whole steps of these shapes, in their order. Returns how many there are."""
    for done, shape in enumerate(shapes):
        on_progress(Progress(phase=Phase.WARMING_UP, done=done, total=len(shapes), current=str(shape)))
        step = _scratch_step(shape, runner.block_size)
        seen.see(shape_map.of(step).recipes())
        sample(runner.execute(build_batch(step, runner.block_size)), _draws(GREEDY, len(step.rows)))
    return len(shapes)


def _run_bucket(runner: ModelRunner, bucket: Bucket, limits: StepLimits) -> tuple[Recipe, ...]:
    """Runs all recipes of a bucket, on padding only, and names them."""
    nothing, only = Fit(0, (0, 0)), Fit(0, bucket.size)
    match bucket.kind:
        case Kind.FLAT:
            shapes = StepShapes(flat=only, chunks=(), singles=(), outputs=nothing, scores=(), is_greedy=True)
            runner.hidden(build_padded_batch(Step(()), shapes, limits))
        case Kind.PREFILL:
            shapes = StepShapes(flat=nothing, chunks=(only,), singles=(), outputs=nothing, scores=(), is_greedy=True)
            runner.attend(build_padded_batch(Step(()), shapes, limits))
        case Kind.DECODE:
            shapes = StepShapes(flat=nothing, chunks=(), singles=(only,), outputs=nothing, scores=(), is_greedy=True)
            runner.attend(build_padded_batch(Step(()), shapes, limits))
        case Kind.SAMPLER:
            transformer = runner.transformer
            hidden = torch.zeros(bucket.size[0], transformer.description.hidden, dtype=transformer.dtype)
            logits = runner.logits(hidden)
            for params in (GREEDY, GENERAL):
                sample(logits, _draws(params, bucket.size[0]))
            return tuple(Recipe(bucket.kind, bucket.size, variant) for variant in (Variant.GREEDY, Variant.GENERAL))
    return (Recipe(bucket.kind, bucket.size),)


def _draws(params: SamplingParams, count: int) -> list[Draw]:
    return [Draw(params, seed=0, tokens=(0,), prompt_len=1)] * count


def _scratch_step(shape: WarmUpShape, block_size: int) -> Step:
    chunks = [_scratch_row(shape.context_len, shape.chunk_len, block_size) for _ in range(shape.chunks)]
    singles = [_scratch_row(shape.context_len, 1, block_size) for _ in range(shape.singles)]
    return Step((*chunks, *singles))


def _scratch_row(context_len: int, new_len: int, block_size: int) -> Row:
    request = Request("warm-up", [0] * (context_len + new_len), GREEDY, seed=0)
    request.blocks = [SCRATCH_BLOCK] * -(-(context_len + new_len) // block_size)
    return Row(request, context_len, new_len, emits=True)

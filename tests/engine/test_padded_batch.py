"""Every index tensor of a padded batch against a naive re-statement: real parts as they are, the rest is scratch."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_engine.planning.shapes.buckets import plan_buckets
from hpu_engine.planning.shapes.choice import Histogram
from hpu_engine.planning.shapes.limits import StepLimits
from hpu_engine.scheduling.kv_blocks import SCRATCH_BLOCK
from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Row, Step
from hpu_engine.step.input import StepInput, input_of
from hpu_engine.step.padded_batch import PaddedBatch, PaddedChunk, PaddedSingles, build_padded_batch
from hpu_engine.step.shapes import Fit, ShapeMap, StepShapes
from tests.engine.rows import PUT, batch_of
from tests.planning.recipe_comparison import reference_cost


@st.composite
def padded_steps(draw: st.DrawFn) -> tuple[Step, StepShapes, StepLimits]:
    """Rows of any kind within limits that have as much room again, and the buckets that planning gives them."""
    size = draw(st.integers(1, 6))
    rows: list[Row] = []
    free = list(range(1, 200))
    shared = [free.pop(0) for _ in range(30)]
    for number in range(draw(st.integers(0, 6))):
        context, new = draw(st.integers(0, 14)), draw(st.integers(1, 9))
        unseen = draw(st.integers(0, 2))
        tokens = [draw(st.integers(0, 1000)) for _ in range(context + new + unseen)]
        request = Request(str(number), tokens, SamplingParams(), seed=0)
        needed = -(-(context + new) // size)
        full = context // size if draw(st.booleans()) else 0
        request.blocks = shared[:full] + [free.pop(draw(st.integers(0, len(free) - 1))) for _ in range(needed - full)]
        scores = draw(st.integers(0, new))
        rows.append(Row(request, context, new, emits=unseen == 0, score_from=context, scores=scores))
    step = Step(tuple(rows))
    limits = StepLimits(
        max_model_len=draw(st.integers(23, 60)),
        max_num_seqs=draw(st.integers(6, 9)),
        max_batched_tokens=draw(st.integers(54, 80)),
        block_size=size,
        kv_blocks=draw(st.integers(1, 60)),
    )
    buckets = plan_buckets(limits, reference_cost(size), Histogram({}, unseen=1.0), recipes=draw(st.integers(5, 25)))
    return step, ShapeMap(size, buckets).of(input_of(step.rows, size)), limits


@settings(max_examples=80)
@given(padded_steps())
def test_every_index_is_what_it_says(case: tuple[Step, StepShapes, StepLimits]) -> None:
    step, shapes, limits = case
    size, spare = limits.block_size, limits.flat_tokens
    given = input_of(step.rows, size)
    batch, plain = build_padded_batch(given, shapes, limits, PUT), batch_of(step, size)
    count = step.num_tokens
    assert batch.num_tokens == shapes.flat.padded
    assert batch.buffer_rows == spare + 1
    for padded, own in ((batch.token_ids, plain.token_ids), (batch.positions, plain.positions)):
        assert padded.tolist() == own.tolist() + [0] * (batch.num_tokens - count)
    assert batch.slots[:count].tolist() == plain.slots.tolist()
    check_scratch(batch.slots[count:].tolist(), limits)
    assert batch.is_real.tolist() == [True] * count + [False] * (batch.num_tokens - count)
    new_blocks = plain.new_blocks.tolist()
    assert batch.new_blocks.tolist() == new_blocks + [SCRATCH_BLOCK] * (batch.new_blocks.shape[0] - len(new_blocks))
    outputs = plain.output_rows.tolist()
    assert batch.output_rows.tolist() == outputs + [spare] * (shapes.outputs.padded - len(outputs))
    scored = [place for piece in batch.score_pieces for place in piece.tolist() if place != spare]
    assert scored == plain.score_rows.tolist()
    assert [piece.shape[0] for piece in batch.score_pieces] == [piece.padded for piece in shapes.scores]
    check_chunks(batch, step, shapes, spare, size)
    check_singles(batch, step, shapes, limits)


def check_chunks(batch: PaddedBatch, step: Step, shapes: StepShapes, spare: int, size: int) -> None:
    rows = [row for row in step.rows if row.new_len > 1]
    start = 0
    assert len(batch.chunks) == len(rows)
    for chunk, row, fit in zip(batch.chunks, rows, shapes.chunks, strict=True):
        new, context = fit.size
        end = row.context_len + row.new_len
        padding = new - row.new_len
        assert chunk.rows.tolist() == [*range(start, start + row.new_len)] + [spare] * padding
        assert chunk.last_visible.tolist() == [*range(row.context_len, end)] + [0] * padding
        own = [row.request.blocks[position // size] for position in range(0, end, size)]
        pages = context + -(-new // size)
        assert chunk.blocks.tolist() == own + [SCRATCH_BLOCK] * (pages - len(own))
        start += row.new_len


def check_singles(batch: PaddedBatch, step: Step, shapes: StepShapes, limits: StepLimits) -> None:
    size, spare = limits.block_size, limits.flat_tokens
    rows = [row for row in step.rows if row.new_len == 1]
    place = sum(row.new_len for row in step.rows if row.new_len > 1)
    for singles, call in zip(batch.singles, shapes.singles, strict=True):
        own, rows = rows[: call.count], rows[call.count :]
        num_rows, num_blocks = call.size
        assert singles.blocks.shape == singles.owners.shape == singles.columns.shape == (num_blocks + 1,)
        assert singles.places.shape == (num_rows, min(num_blocks, limits.blocks_per_row))
        used = {0}
        for number in range(num_rows):
            row = own[number] if number < len(own) else None
            assert singles.rows[number] == (place if row else spare)
            assert singles.lens[number] == (row.context_len + 1 if row else 1)
            tables = (
                [row.request.blocks[position // size] for position in range(0, row.context_len + 1, size)]
                if row
                else []
            )
            for column in range(singles.places.shape[1]):
                found = int(singles.places[number, column])
                if column < len(tables):
                    assert singles.blocks[found] == tables[column]
                    assert (int(singles.owners[found]), int(singles.columns[found])) == (number, column)
                    used.add(found)
                else:
                    assert found == 0, "a row reads what is not its own"
            place += row is not None
        assert singles.blocks[0] == SCRATCH_BLOCK
        for unused in set(range(num_blocks + 1)) - used:
            assert singles.blocks[unused] == SCRATCH_BLOCK
    assert not rows


@settings(max_examples=40)
@given(padded_steps())
def test_the_shape_of_every_tensor_follows_from_the_buckets_alone(case: tuple[Step, StepShapes, StepLimits]) -> None:
    """A batch of nothing but padding, as warm-up runs it, has the very shapes of a real one."""
    step, shapes, limits = case

    def empty(fit: Fit) -> Fit:
        return Fit(0, fit.size)

    padding = StepShapes(
        flat=empty(shapes.flat),
        chunks=tuple(map(empty, shapes.chunks)),
        singles=tuple(map(empty, shapes.singles)),
        outputs=empty(shapes.outputs),
        scores=tuple(map(empty, shapes.scores)),
    )
    real = build_padded_batch(input_of(step.rows, limits.block_size), shapes, limits, PUT)
    dummy = build_padded_batch(StepInput(), padding, limits, PUT)
    assert tensors(real) == tensors(dummy)
    assert not dummy.is_real.any()
    check_scratch(dummy.slots.tolist(), limits)
    for part in parts(dummy):
        assert (part.blocks == SCRATCH_BLOCK).all()
        assert (part.rows == limits.flat_tokens).all()


def check_scratch(slots: list[int], limits: StepLimits) -> None:
    """Each padding token has a slot of its own: in block 0, or in a block behind the pool that the cache still has."""
    assert limits.kv_blocks is not None
    blocks = {slot // limits.block_size for slot in slots}
    assert len(set(slots)) == len(slots)
    assert blocks <= {SCRATCH_BLOCK, *range(limits.kv_blocks + 1, limits.kv_blocks + limits.scratch_blocks)}


def parts(batch: PaddedBatch) -> list[PaddedChunk | PaddedSingles]:
    return [*batch.chunks, *batch.singles]


def tensors(batch: PaddedBatch) -> list[tuple[torch.dtype, torch.Size]]:
    of_parts = [getattr(part, field.name) for part in parts(batch) for field in dataclasses.fields(part)]
    flat = [batch.token_ids, batch.positions, batch.slots, batch.is_real, batch.output_rows, *batch.score_pieces]
    return [(tensor.dtype, tensor.shape) for tensor in (*flat, *of_parts)]

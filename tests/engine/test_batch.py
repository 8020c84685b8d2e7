"""Every index tensor of a batch against a naive re-statement, for any mixture of rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_engine.scheduling.kv_blocks import SCRATCH_BLOCK
from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Row, Step
from tests.engine.rows import batch_of


@st.composite
def steps(draw: st.DrawFn) -> tuple[Step, int]:
    size = draw(st.integers(1, 6))
    free = list(range(1, 200))
    rows = []
    for number in range(draw(st.integers(0, 6))):
        context, new, unseen = draw(st.integers(0, 14)), draw(st.integers(1, 9)), draw(st.integers(0, 3))
        tokens = draw(st.lists(st.integers(0, 1000), min_size=context + new + unseen, max_size=context + new + unseen))
        request = Request(str(number), tokens, SamplingParams(), seed=0)
        blocks = -(-(context + new) // size) + draw(st.integers(0, 2))
        request.blocks = [free.pop(draw(st.integers(0, len(free) - 1))) for _ in range(blocks)]
        rows.append(Row(request, context, new, emits=unseen == 0))
    return Step(tuple(rows)), size


@settings(max_examples=150)
@given(steps())
def test_every_index_is_what_it_says(case: tuple[Step, int]) -> None:
    step, size = case
    batch = batch_of(step, size)
    ordered = [row for row in step.rows if row.new_len > 1] + [row for row in step.rows if row.new_len == 1]
    token_ids, positions, slots, last = [], [], [], {}
    for row in ordered:
        for position in range(row.context_len, row.context_len + row.new_len):
            token_ids.append(row.request.tokens[position])
            positions.append(position)
            slots.append(row.request.blocks[position // size] * size + position % size)
        last[row.request.request_id] = len(token_ids) - 1
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert len(set(slots)) == len(slots)
    assert all(slot >= size for slot in slots), "a token is written to scratch"
    assert batch.new_blocks.tolist() == [slot // size for slot in slots if slot % size == 0]
    assert batch.output_rows.tolist() == [last[row.request.request_id] for row in step.rows if row.emits]
    start = 0
    for chunk, row in zip(batch.chunks, ordered, strict=False):
        assert (chunk.start, chunk.new_len, chunk.context_len) == (start, row.new_len, row.context_len)
        used = -(-(row.context_len + row.new_len) // size)
        assert chunk.blocks.tolist() == row.request.blocks[:used]
        start += row.new_len
    singles = ordered[len(batch.chunks) :]
    assert batch.num_singles == len(singles)
    assert batch.num_tokens == start + len(singles) == step.num_tokens
    assert batch.single_lens.tolist() == [row.context_len + 1 for row in singles]
    width = max((-(-(row.context_len + 1) // size) for row in singles), default=0)
    assert batch.single_blocks.shape == (len(singles), width)
    for table, row in zip(batch.single_blocks.tolist(), singles, strict=True):
        used = -(-(row.context_len + 1) // size)
        assert table == row.request.blocks[:used] + [SCRATCH_BLOCK] * (width - used)
    for tensor in (batch.token_ids, batch.positions, batch.slots, batch.single_blocks, batch.single_lens):
        assert tensor.dtype == torch.int64

"""From the rows of a step to index tensors of its own shapes: the only place that knows slot arithmetic.

Rows are laid out flat, rows with several new tokens (`chunks`) first, rows with one new token (`singles`) behind them.
`context_len`, the number of tokens already in the cache, is used alike for slot, rotary position and mask. A slot is
`block * block_size + offset`; block 0 is scratch, and padding reads and writes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpu_engine.scheduling.kv_blocks import SCRATCH_BLOCK
from hpu_engine.step.input import RowInput, StepInput
from hpu_engine.step.shapes import SCORED_AT_ONCE, split_rows

Put = Callable[[Sequence[int] | Sequence[Sequence[int]]], Tensor]
"""Whole numbers of the host as an int64 tensor where the step runs (`Device.put`)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row: tokens `start : start + new_len` of the flat batch. `blocks` [blocks] covers context and new tokens."""

    start: int
    new_len: int
    context_len: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Index tensors of one step, int64. `singles` counts the rows with one new token, the last tokens of the batch.

    token_ids, positions, slots: [tokens]. new_blocks: [blocks], those whose first slot this step writes.
    single_blocks: [singles, width], padded with scratch. single_lens: [singles], tokens visible to the row, its own
    included. output_rows: [emitting rows], in the order of the step. score_rows: [scored prompt tokens], row by row in
    that order.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    new_blocks: Tensor
    chunks: tuple[Chunk, ...]
    single_blocks: Tensor
    single_lens: Tensor
    output_rows: Tensor
    score_rows: Tensor

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_singles(self) -> int:
        return self.single_lens.shape[0]

    @property
    def score_pieces(self) -> tuple[Tensor, ...]:
        """`score_rows`, so many at a time as logits are wanted of."""
        return torch.split(self.score_rows, SCORED_AT_ONCE) if self.score_rows.shape[0] else ()


@dataclass(frozen=True, slots=True)
class Layout:
    """A step laid out flat, as numbers. `new_blocks`, `output_rows` and `score_rows` are as in `Batch`."""

    chunks: list[RowInput]
    singles: list[RowInput]
    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    new_blocks: list[int]
    output_rows: list[int]
    score_rows: list[int]


def layout(step: StepInput, block_size: int) -> Layout:
    """Where each token of a step lies, and what it reads and writes."""
    chunks, singles = split_rows(step.rows)
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    new_blocks: list[int] = []
    first_token: dict[int, int] = {}
    for row in (*chunks, *singles):
        start, end = row.context_len, row.context_len + row.new_len
        first_token[id(row)] = len(token_ids)
        token_ids.extend(row.token_ids)
        positions.extend(range(start, end))
        slots.extend(_slots(row.blocks, start, end, block_size))
        new_blocks.extend(row.blocks[-(-start // block_size) : -(-end // block_size)])
    return Layout(
        chunks=chunks,
        singles=singles,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        new_blocks=new_blocks,
        output_rows=[first_token[id(row)] + row.new_len - 1 for row in step.rows if row.emits],
        score_rows=[
            first_token[id(row)] + row.score_from - row.context_len + number
            for row in step.rows
            for number in range(row.scores)
        ],
    )


def build_batch(step: StepInput, block_size: int, put: Put) -> Batch:
    """The batch of a step; an empty step gives an empty, legal batch."""
    flat = layout(step, block_size)
    chunks: list[Chunk] = []
    start = 0
    for row in flat.chunks:
        chunks.append(Chunk(start, row.new_len, row.context_len, put(row.blocks)))
        start += row.new_len
    return Batch(
        token_ids=put(flat.token_ids),
        positions=put(flat.positions),
        slots=put(flat.slots),
        new_blocks=put(flat.new_blocks),
        chunks=tuple(chunks),
        single_blocks=_padded_tables(flat.singles, put),
        single_lens=put([row.context_len + 1 for row in flat.singles]),
        output_rows=put(flat.output_rows),
        score_rows=put(flat.score_rows),
    )


def _slots(blocks: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    if end - start == 1:
        return [blocks[start // block_size] * block_size + start % block_size]
    slots: list[int] = []
    for number in range(start // block_size, -(-end // block_size)):
        first = max(start - number * block_size, 0)
        last = min(end - number * block_size, block_size)
        base = blocks[number] * block_size
        slots.extend(range(base + first, base + last))
    return slots


def _padded_tables(rows: Sequence[RowInput], put: Put) -> Tensor:
    width = max((len(row.blocks) for row in rows), default=0)
    padded = [[*row.blocks, *[SCRATCH_BLOCK] * (width - len(row.blocks))] for row in rows]
    return put(padded).reshape(len(rows), width)

"""From the rows of a step to index tensors of bucket shapes: what a device with compiled shapes is given.

Every tensor's shape follows from the buckets alone. Tokens lie as in `hpu_engine.step.batch`, padding behind them.
Attention reads and writes one buffer of `buffer_rows` rows, as large as any step plus a spare row, so that its shapes
do not depend on the number of tokens. Padding tokens write to scratch slots, no two to one; padding blocks are scratch,
and padding rows take from and give to the spare row: nothing real is read or written by padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hpu_engine.planning.shapes.limits import StepLimits
from hpu_engine.scheduling.kv_blocks import SCRATCH_BLOCK
from hpu_engine.step.batch import Put, layout
from hpu_engine.step.input import RowInput, StepInput
from hpu_engine.step.shapes import Fit, StepShapes


@dataclass(frozen=True, slots=True)
class PaddedChunk:
    """One row with several new tokens. `rows` [new tokens]: places in the buffer; `last_visible` [new tokens]: each
    sees the positions up to it; `blocks` [context blocks + blocks of the new tokens].
    """

    rows: Tensor
    last_visible: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class PaddedSingles:
    """Rows with one new token. `rows` [rows]: places in the buffer; `lens` [rows]: visible tokens.

    `blocks` [1 + blocks]: scratch, then the blocks of all rows, row by row; `owners` and `columns` [1 + blocks]: whose
    block it is and which of that row's; nobody's are given to row 0, which does not take them. `places` [rows, width]:
    where in `blocks` each row's are, 0 (scratch) where it has no more; the width holds the longest row that the bucket
    covers.
    """

    rows: Tensor
    lens: Tensor
    blocks: Tensor
    owners: Tensor
    columns: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """token_ids, positions, slots, is_real: [tokens]. new_blocks: as many as so many tokens can begin, padded with
    scratch. output_rows [emitting rows], in the order of the step, and score_pieces, each [scored prompt tokens]: their
    padding takes the last row of the buffer.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    is_real: Tensor
    new_blocks: Tensor
    chunks: tuple[PaddedChunk, ...]
    singles: tuple[PaddedSingles, ...]
    output_rows: Tensor
    score_pieces: tuple[Tensor, ...]
    buffer_rows: int

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


def build_padded_batch(step: StepInput, shapes: StepShapes, limits: StepLimits, put: Put) -> PaddedBatch:
    """The batch of a step in `shapes`, which are those of this step under `limits`. An empty step is padding only."""
    size, spare = limits.block_size, limits.flat_tokens
    flat = layout(step, size)
    missing = shapes.flat.padded - len(flat.token_ids)
    singles: list[PaddedSingles] = []
    chunk_tokens = sum(row.new_len for row in flat.chunks)
    first = 0
    for call in shapes.singles:
        rows = flat.singles[first : first + call.count]
        singles.append(_singles(rows, chunk_tokens + first, call, spare, limits=limits, put=put))
        first += call.count
    chunks: list[PaddedChunk] = []
    start = 0
    for row, fit in _paired(flat.chunks, shapes.chunks):
        chunks.append(_chunk(row, start, fit, spare, block_size=size, put=put))
        start += row.new_len if row else 0
    pieces: list[Tensor] = []
    scored = 0
    for piece in shapes.scores:
        pieces.append(put(_filled(flat.score_rows[scored : scored + piece.count], piece.padded, spare)))
        scored += piece.count
    return PaddedBatch(
        token_ids=put(flat.token_ids + [0] * missing),
        positions=put(flat.positions + [0] * missing),
        slots=put(flat.slots + scratch_slots(missing, limits)),
        is_real=put([True] * len(flat.token_ids) + [False] * missing).bool(),
        new_blocks=put(_filled(flat.new_blocks, _most_new_blocks(shapes.flat.padded, limits), SCRATCH_BLOCK)),
        chunks=tuple(chunks),
        singles=tuple(singles),
        output_rows=put(_filled(flat.output_rows, shapes.outputs.padded, spare)),
        score_pieces=tuple(pieces),
        buffer_rows=spare + 1,
    )


def scratch_slots(count: int, limits: StepLimits) -> list[int]:
    """As many KV slots for padding, each another one: those of block 0, then of the blocks behind the pool."""
    size, behind = limits.block_size, (limits.kv_blocks or 0) + 1
    blocks = [SCRATCH_BLOCK, *range(behind, behind + limits.scratch_blocks - 1)]
    return [blocks[number // size] * size + number % size for number in range(count)]


def _most_new_blocks(tokens: int, limits: StepLimits) -> int:
    """A row of n tokens begins at most n, and at most one more than n fills."""
    return min(tokens, tokens // limits.block_size + limits.max_num_seqs)


def _paired(rows: Sequence[RowInput], fits: Sequence[Fit]) -> list[tuple[RowInput | None, Fit]]:
    """A shape without a row is padding only: warm-up runs such."""
    assert len(rows) <= len(fits)
    return [(rows[index] if index < len(rows) else None, fit) for index, fit in enumerate(fits)]


def _chunk(row: RowInput | None, start: int, fit: Fit, spare: int, *, block_size: int, put: Put) -> PaddedChunk:
    new_tokens, context_blocks = fit.size
    pages = context_blocks + -(-new_tokens // block_size)
    own, first = (row.new_len, row.context_len) if row else (0, 0)
    blocks = list(row.blocks) if row else []
    return PaddedChunk(
        rows=put(_filled(list(range(start, start + own)), new_tokens, spare)),
        # A row that saw nothing would have no softmax; what padding sees is dropped.
        last_visible=put(_filled(list(range(first, first + own)), new_tokens, 0)),
        blocks=put(_filled(blocks, pages, SCRATCH_BLOCK)),
    )


def _singles(
    rows: Sequence[RowInput], start: int, call: Fit, spare: int, *, limits: StepLimits, put: Put
) -> PaddedSingles:
    num_rows, num_blocks = call.size
    width = min(num_blocks, limits.blocks_per_row)
    blocks, owners, columns = [SCRATCH_BLOCK], [0], [0]
    places: list[list[int]] = []
    for number, row in enumerate(rows):
        used = len(row.blocks)
        places.append(_filled(list(range(len(blocks), len(blocks) + used)), width, 0))
        blocks.extend(row.blocks)
        owners.extend([number] * used)
        columns.extend(range(used))
    places.extend([[0] * width] * (num_rows - len(rows)))
    return PaddedSingles(
        rows=put(_filled(list(range(start, start + len(rows))), num_rows, spare)),
        lens=put(_filled([row.context_len + 1 for row in rows], num_rows, 1)),
        blocks=put(_filled(blocks, 1 + num_blocks, SCRATCH_BLOCK)),
        owners=put(_filled(owners, 1 + num_blocks, 0)),
        columns=put(_filled(columns, 1 + num_blocks, 0)),
        places=put(places).view(num_rows, width),
    )


def _filled(values: list[int], length: int, filler: int) -> list[int]:
    assert len(values) <= length, f"{len(values)} values in a shape of {length}"
    return values + [filler] * (length - len(values))

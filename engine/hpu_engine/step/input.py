"""What a step computes, in whole numbers: all that a batch is built from, and all that travels to another worker.

The scheduler's rows know their requests; a `StepInput` knows none, so the workers that follow a rank's first one, and a
rank without work, run a step from it alone. Torch-free.

Wire form: 32-bit little-endian numbers. A frame is the number of rows, then of each row its context length, whether it
emits, its first scored position, how many tokens it scores, how many new tokens and blocks it has, and these tokens and
blocks: 24 bytes, and 4 for each new token and each block. A decoding row over 2048 tokens in blocks of 128 takes 92.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpu_engine.scheduling.scheduler import Row

_ROW_NUMBERS = 6
_BYTES = 4


class StepInputError(ValueError):
    """Bytes that are no step."""


class RowInput(NamedTuple):
    """One request's share of a step. `token_ids` are the new tokens, `blocks` those of context and new tokens.

    A row with one new token may name, in its place, an output of the previous step (`output_of`). `emits`: the logits
    behind the last token are wanted. `scores`: as many are wanted from position `score_from` on, to score the prompt.
    """

    token_ids: Sequence[int]
    blocks: Sequence[int]
    context_len: int
    emits: bool
    score_from: int = 0
    scores: int = 0

    @property
    def new_len(self) -> int:
        return len(self.token_ids)


class StepInput(NamedTuple):
    """The rows of a step, in the scheduler's order."""

    rows: tuple[RowInput, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def refers_back(self) -> bool:
        """Whether a token is an output of the previous step."""
        return any(row.token_ids[0] < 0 for row in self.rows if len(row.token_ids) == 1)

    def encode(self) -> bytes:
        numbers = array("i", [len(self.rows)])
        for row in self.rows:
            numbers.extend(
                (row.context_len, row.emits, row.score_from, row.scores, len(row.token_ids), len(row.blocks))
            )
            numbers.extend(row.token_ids)
            numbers.extend(row.blocks)
        return _little_endian(numbers).tobytes()

    @classmethod
    def decode(cls, frame: bytes) -> StepInput:
        """Raises StepInputError where `frame` is not what `encode` writes."""
        if not frame or len(frame) % _BYTES:
            raise StepInputError(f"{len(frame)} bytes are not a whole number of 32-bit numbers")
        read = array("i")
        read.frombytes(frame)
        numbers = _little_endian(read).tolist()
        if numbers[0] < 0:
            raise StepInputError(f"{numbers[0]} is not a number of rows")
        rows, place = [], 1
        for number in range(numbers[0]):
            head = numbers[place : place + _ROW_NUMBERS]
            if len(head) < _ROW_NUMBERS or min(head) < 0 or head[1] > 1:
                raise StepInputError(f"row {number} of {numbers[0]}: {head} is not the beginning of a row")
            context_len, emits, score_from, scores, new, held = head
            place += _ROW_NUMBERS
            tokens, blocks = numbers[place : place + new], numbers[place + new : place + new + held]
            place += new + held
            if not new or place > len(numbers):
                raise StepInputError(f"row {number} of {numbers[0]}: {new} tokens and {held} blocks are not there")
            rows.append(RowInput(tokens, blocks, context_len, bool(emits), score_from, scores))
        if place != len(numbers):
            raise StepInputError(f"{len(numbers) - place} numbers behind the last of {numbers[0]} rows")
        return cls(tuple(rows))


def output_of(place: int) -> int:
    """The token id that stands for output number `place` of the previous step."""
    return -1 - place


def input_of(rows: Iterable[Row], block_size: int) -> StepInput:
    """The scheduler's rows without their requests."""
    return StepInput(
        tuple(
            RowInput(
                row.request.tokens[row.context_len : row.context_len + row.new_len],
                row.request.blocks[: -(-(row.context_len + row.new_len) // block_size)],
                row.context_len,
                row.emits,
                row.score_from,
                row.scores,
            )
            for row in rows
        )
    )


def _little_endian(numbers: array[int]) -> array[int]:
    assert numbers.itemsize == _BYTES
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers

"""Which shapes a step runs in, and which of them ran before. Torch-free.

A step is cut into the parts that a graph device compiles apart (`hpu_engine.planning.shapes.limits`): its tokens, each
row with several new tokens, all rows with one, and the rows whose logits are wanted. With a set of buckets each part
runs in the cheapest bucket that covers it, the rest of which is padding; without one it runs in the shape it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpu_engine.planning.shapes.buckets import BucketSet, shape_in_words
from hpu_engine.planning.shapes.limits import Kind, Size, split_decode
from hpu_engine.step.input import RowInput, StepInput

SCORED_AT_ONCE = 64
"""Logits of a whole chunk would take more memory than anything else in a step."""
WORDS_LIMIT = 300
MOST_SHAPES = 1 << 16
"""So many shapes are remembered; a device with exact shapes could meet more, and then stops counting."""


class Recipe(NamedTuple):
    """What a device compiles once. A recipe of the sampler ends at the logits: on this device the host chooses tokens,
    by plain code that is not counted.
    """

    kind: Kind
    size: Size


@dataclass(frozen=True, slots=True)
class Fit:
    """`count` tokens or rows, run in the shape `size`: what is beyond `count` there is padding."""

    count: int
    size: Size

    @property
    def padded(self) -> int:
        return self.size[0]


@dataclass(frozen=True, slots=True)
class StepShapes:
    """The shapes of one step: `flat` counts tokens; `chunks`, in order, new tokens; `singles`, one item per call, and
    `outputs` rows; `scores` prompt tokens, one item per call. Nothing runs where a size is 0.
    """

    flat: Fit
    chunks: tuple[Fit, ...]
    singles: tuple[Fit, ...]
    outputs: Fit
    scores: tuple[Fit, ...]

    @property
    def is_empty(self) -> bool:
        return not self.flat.padded

    def recipes(self) -> Iterator[Recipe]:
        """One item per call, in the order of the step."""
        if self.flat.padded:
            yield Recipe(Kind.FLAT, self.flat.size)
        for chunk in self.chunks:
            yield Recipe(Kind.PREFILL, chunk.size)
        for call in self.singles:
            yield Recipe(Kind.DECODE, call.size)
        if self.outputs.padded:
            yield Recipe(Kind.SAMPLER, self.outputs.size)
        for piece in self.scores:
            yield Recipe(Kind.SAMPLER, piece.size)

    def __str__(self) -> str:
        """The shapes in words, for heartbeats and evidence of a death."""
        counts = Counter(shape_in_words(recipe.kind, recipe.size) for recipe in self.recipes())
        words = "; ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
        return words if len(words) <= WORDS_LIMIT else words[: WORDS_LIMIT - 1] + "…"


class ShapeMap:
    """From a step to its shapes: with `buckets` padded ones, without them its own."""

    def __init__(self, block_size: int, buckets: BucketSet | None = None) -> None:
        assert buckets is None or buckets.limits.block_size == block_size
        self.block_size = block_size
        self.buckets = buckets
        self._scored_at_once = SCORED_AT_ONCE
        if buckets is not None:
            self._scored_at_once = min(SCORED_AT_ONCE, buckets.limits.largest(Kind.SAMPLER)[0])

    def of(self, step: StepInput) -> StepShapes:
        """Raises `hpu_engine.planning.shapes.buckets.UncoveredShape` for a step beyond the limits of the buckets."""
        size = self.block_size
        chunks, singles = split_rows(step.rows)
        return StepShapes(
            flat=self._fit(Kind.FLAT, step.num_tokens),
            chunks=tuple(self._fit(Kind.PREFILL, row.new_len, -(-row.context_len // size)) for row in chunks),
            singles=tuple(self._single_calls([row.context_len // size + 1 for row in singles])),
            outputs=self._fit(Kind.SAMPLER, sum(row.emits for row in step.rows)),
            scores=tuple(
                self._fit(Kind.SAMPLER, count)
                for count in _pieces(sum(row.scores for row in step.rows), self._scored_at_once)
            ),
        )

    def _single_calls(self, blocks_per_row: list[int]) -> Iterator[Fit]:
        most = sum(blocks_per_row) if self.buckets is None else self.buckets.limits.decode_blocks
        for rows, blocks in split_decode(blocks_per_row, most):
            yield self._fit(Kind.DECODE, rows, blocks)

    def _fit(self, kind: Kind, first: int, second: int = 0) -> Fit:
        if not first:
            return Fit(0, (0, 0))
        if self.buckets is None:
            return Fit(first, (first, second))
        return Fit(first, self.buckets.find(kind, first, second).size)


class FirstSeen:
    """Counts recipes that run for the first time after warm-up: what would be compiled while clients wait."""

    def __init__(self) -> None:
        self._seen: set[Recipe] = set()
        self._is_warm = False
        self.after_warm_up = 0

    def end_warm_up(self) -> None:
        self._is_warm = True

    def see(self, recipes: Iterable[Recipe]) -> None:
        for recipe in recipes:
            if recipe not in self._seen and len(self._seen) < MOST_SHAPES:
                self._seen.add(recipe)
                self.after_warm_up += self._is_warm


def split_rows(rows: Sequence[RowInput]) -> tuple[list[RowInput], list[RowInput]]:
    """Rows with several new tokens, and rows with one, which need less: each in the order of the step."""
    return [row for row in rows if row.new_len != 1], [row for row in rows if row.new_len == 1]


def _pieces(total: int, most: int) -> Iterator[int]:
    for start in range(0, total, most):
        yield min(most, total - start)

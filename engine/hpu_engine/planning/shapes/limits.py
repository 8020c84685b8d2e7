"""What a scheduler may put into one step, and what of it is compiled.

The unit of compilation. A mixed step is cut into four kinds of recipe, compiled apart, so their counts add instead of
multiplying:

- flat: everything that sees tokens only as rows of one matrix (norms, projections, MLP, router, experts), keyed by the
  number of tokens, prefill and decode rows together;
- prefill attention: one row per call, keyed by its new tokens and the KV blocks of context before them;
- decode attention: all decode rows in one call, keyed by rows and KV blocks over all rows;
- sampler: the head and the choice of tokens, keyed by the rows that emit one, in two variants (greedy, general).

Attention reads and writes buffers of the size of the budget, so the token count is not part of its key.

Bounds. New tokens of a row plus its context never exceed `max_model_len`; a step's tokens never exceed the budget;
decode rows whose blocks exceed the largest decode shape are run in several calls (`split_decode`), which happens only
when rows share prefix blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

Size = tuple[int, int]
"""The two sizes of a shape; the second is 0 for kinds that have one."""


class Kind(StrEnum):
    FLAT = "flat"
    PREFILL = "prefill"
    DECODE = "decode"
    SAMPLER = "sampler"


RECIPES_PER_SHAPE = {Kind.FLAT: 1, Kind.PREFILL: 1, Kind.DECODE: 1, Kind.SAMPLER: 2}


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds a step. Tokens, except `kv_blocks`; None there means that memory sets no bound."""

    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    kv_blocks: int | None = None

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def flat_tokens(self) -> int:
        return min(self.max_batched_tokens, self.max_num_seqs * self.max_model_len)

    @property
    def prefill_tokens(self) -> int:
        return min(self.max_batched_tokens, self.max_model_len)

    @property
    def decode_rows(self) -> int:
        return min(self.max_num_seqs, self.max_batched_tokens)

    @property
    def decode_blocks(self) -> int:
        """Blocks of the largest decode call: what memory holds, but always one row of the model's length."""
        every_row_full = self.decode_rows * self.blocks_per_row
        if self.kv_blocks is None:
            return every_row_full
        return max(self.blocks_per_row, min(every_row_full, self.kv_blocks))

    @property
    def scratch_blocks(self) -> int:
        """Blocks beside the pool that padding tokens write to: each of them has a slot that no other one has."""
        return max(1, -(-self.flat_tokens // self.block_size))

    def context_blocks(self, new_tokens: int) -> int:
        """KV blocks that the longest context before `new_tokens` occupies."""
        return -(-(self.max_model_len - new_tokens) // self.block_size)

    def largest(self, kind: Kind) -> Size:
        """The clipped maximum of every size of `kind`."""
        match kind:
            case Kind.FLAT:
                return (self.flat_tokens, 0)
            case Kind.PREFILL:
                return (self.prefill_tokens, self.context_blocks(1))
            case Kind.DECODE:
                return (self.decode_rows, self.decode_blocks)
            case Kind.SAMPLER:
                return (self.decode_rows, 0)

    def can_emit(self, kind: Kind, low: Size, high: Size) -> bool:
        """Whether some shape of `kind` with `low < size <= high` in each size can occur (0 counts as 0 <= 0)."""
        largest = self.largest(kind)
        if high[0] < 1 or low[0] >= largest[0]:
            return False
        match kind:
            case Kind.FLAT | Kind.SAMPLER:
                return True
            case Kind.PREFILL:
                # The fewest new tokens leave the most room for context.
                return low[1] < self.context_blocks(low[0] + 1) or high[1] == 0
            case Kind.DECODE:
                rows = min(high[0], largest[0])
                fewest, most = low[0] + 1, min(rows * self.blocks_per_row, largest[1])
                return high[1] >= fewest and low[1] < most

    def maximal(self, kind: Kind) -> Iterator[Size]:
        """Shapes of `kind` such that every shape that can occur is at most one of them in both sizes.

        So a set of buckets covers everything if and only if it covers these.
        """
        match kind:
            case Kind.FLAT | Kind.SAMPLER:
                yield self.largest(kind)
            case Kind.PREFILL:
                yield (self.prefill_tokens, self.context_blocks(self.prefill_tokens))
                for blocks in range(self.context_blocks(self.prefill_tokens) + 1, self.context_blocks(1) + 1):
                    # The most new tokens whose context can still reach into the last of `blocks` blocks.
                    yield (min(self.prefill_tokens, self.max_model_len - (blocks - 1) * self.block_size - 1), blocks)
            case Kind.DECODE:
                yield self.largest(kind)


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step as a scheduler emits it. `prefill` has (new tokens, context blocks) for each row; `sampled` emit."""

    prefill: tuple[Size, ...]
    decode_rows: int
    decode_blocks: int
    sampled: int

    @property
    def tokens(self) -> int:
        return self.decode_rows + sum(new for new, _ in self.prefill)

    def parts(self) -> Iterator[tuple[Kind, Size]]:
        """The recipes that run it, one item per call."""
        if self.tokens:
            yield Kind.FLAT, (self.tokens, 0)
        for size in self.prefill:
            yield Kind.PREFILL, size
        if self.decode_rows:
            yield Kind.DECODE, (self.decode_rows, self.decode_blocks)
        if self.sampled:
            yield Kind.SAMPLER, (self.sampled, 0)


def split_decode(blocks_per_row: Sequence[int], most_blocks: int) -> Iterator[Size]:
    """(rows, blocks) of each decode call: rows in order, a new call where the next row would exceed `most_blocks`."""
    rows = blocks = 0
    for row in blocks_per_row:
        if rows and blocks + row > most_blocks:
            yield rows, blocks
            rows = blocks = 0
        rows += 1
        blocks += row
    if rows:
        yield rows, blocks

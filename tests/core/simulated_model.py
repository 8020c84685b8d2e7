"""A model without arithmetic that still needs every slot right.

Its KV memory remembers, per slot, the whole prefix that was written there. A row may only run when every context slot
of its table holds exactly its own prefix; the next token is a function of all tokens. Whatever a scheduler mixes up
(a stale block, a prefix shared wrongly, a token lost in a preemption) shows here as an error or another token.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from hpu_engine.scheduling.scheduler import Step

VOCAB = 5


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


def expected_output(prompt: Sequence[int], count: int, stop: Sequence[int] = ()) -> list[int]:
    """What one request alone, without any cache, would be answered."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Token:
    token: int
    logprobs: None = None


class SimulatedModel:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[int, tuple[int, ...]] = {}

    def run(self, step: Step) -> list[Token | None]:
        """What each row emits. Raises AssertionError for a row that reads what is not its own."""
        written: set[int] = set()
        for row in step.rows:
            tokens = tuple(row.request.tokens)
            assert row.new_len > 0
            assert row.context_len + row.new_len <= len(tokens)
            for position in range(row.context_len):
                held = self._slots.get(self._slot(row.request.blocks, position))
                assert held == tokens[: position + 1], f"context slot of position {position} holds {held}"
            for position in range(row.context_len, row.context_len + row.new_len):
                slot = self._slot(row.request.blocks, position)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self._slots[slot] = tokens[: position + 1]
        return [Token(next_token(row.request.tokens)) if row.emits else None for row in step.rows]

    def _slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self._block_size] * self._block_size + position % self._block_size

"""Which tokens a request holds and how often its output holds each: what penalties need, kept up token by token.

Torch-free. To look through all tokens of a long context again for every new one costs more than the model's step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class TokenCounts:
    """`ids` are the distinct tokens of prompt and output, `times` how often the output holds each of them."""

    def __init__(self) -> None:
        self.ids = array("q")
        self.times = array("q")
        self._places: dict[int, int] = {}
        self._num_counted = 0

    def count(self, tokens: Sequence[int], prompt_len: int) -> None:
        """Counts what was added to `tokens` since the last call. They are one request's, and only grow."""
        for token in tokens[self._num_counted :]:
            place = self._places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.times.append(0)
            self.times[place] += self._num_counted >= prompt_len
            self._num_counted += 1

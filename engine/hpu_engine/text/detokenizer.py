"""Tokens of one request to text, as they arrive. Torch-free; owns what a client of a stream may already see.

A token stands for bytes, always the same ones; the text is all bytes read as UTF-8. Invariants: the pieces joined are
the whole text, whatever the steps were; a character whose bytes are split over tokens appears once it is complete
(U+FFFD only where the whole text has it too); nothing of a stop string ever leaves; text waits only while it really is
the beginning of a stop string.

A stop string ends the text at the first moment the text ends with it, so the result does not depend on how the model
cut the same characters into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class TokenText:
    """What the ids of a vocabulary stand for; no bytes at all for an id that is no text.

    `leading_spaces`: so many spaces at the beginning of a text belong to the tokens and not to the text (SentencePiece
    marks the beginning of a word with one, that of the first word too).
    """

    bytes_of: Callable[[int], bytes]
    leading_spaces: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may leave now, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Cuts a text that arrives in pieces at the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Piece:
        """What may leave after `text` was added. Not to be called again after a stop."""
        if not self._stops:
            return Piece(text)
        seen = self._held + text
        if (hit := self._first_hit(seen)) is not None:
            start, stop = hit
            self._held = ""
            return Piece(seen[:start], stop)
        keep = self._open_prefix(seen)
        self._held = seen[len(seen) - keep :]
        return Piece(seen[: len(seen) - keep])

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_hit(self, text: str) -> tuple[int, str] | None:
        hits = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(hits)[1:] if hits else None

    def _open_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(max(map(len, self._stops)) - 1, len(text))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class Detokenizer:
    """One request's text.

    `continues` says that the text stands behind another one, the prompt: its leading spaces are part of it.
    Stop strings count only in the text of the tokens behind the first `stops_after`.
    """

    def __init__(
        self, tokens: TokenText, stops: Sequence[str] = (), *, stops_after: int = 0, continues: bool = False
    ) -> None:
        self._bytes_of = tokens.bytes_of
        self._leading_spaces = 0 if continues else tokens.leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stops)
        self._unstoppable = stops_after
        self.num_chars = 0
        """Characters that are complete, whether they have left or not."""
        self.num_shown = 0
        """Characters that have left."""

    def push(self, token_id: int) -> Piece:
        """What may leave after one more token. Not to be called again after a stop."""
        data = self._bytes_of(token_id)
        if self._leading_spaces and data:
            data = self._without_leading_spaces(data)
        new = self._utf8.decode(data)
        if self._unstoppable:
            self._unstoppable -= 1
            return self._shown(Piece(new), len(new))
        return self._shown(self._stops.push(new), len(new))

    def flush(self) -> Piece:
        """What was held back, when no more tokens come. An incomplete character becomes U+FFFD."""
        new = self._utf8.decode(b"", final=True)
        if self._unstoppable:
            return self._shown(Piece(new), len(new))
        piece = self._stops.push(new)
        if piece.stop is None:
            piece = Piece(piece.text + self._stops.flush())
        return self._shown(piece, len(new))

    def _shown(self, piece: Piece, new_chars: int) -> Piece:
        self.num_chars += new_chars
        self.num_shown += len(piece.text)
        return piece

    def _without_leading_spaces(self, data: bytes) -> bytes:
        spaces = min(len(data) - len(data.lstrip(b" ")), self._leading_spaces)
        self._leading_spaces = self._leading_spaces - spaces if spaces == len(data) else 0
        return data[spaces:]

"""Tokens of one request to text, as they arrive. Torch-free; owns what a client of a stream may already see.

Invariants: the pieces joined are the whole text, whatever the steps were; a character whose bytes are split over
tokens appears once it is complete (U+FFFD only where the whole text has it too); nothing of a stop string ever leaves;
text waits only while it really is the beginning of a stop string.

A stop string ends the text at the first moment the text ends with it, so the result does not depend on how the model
cut the same characters into tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
UTF8_TAIL_BYTES = 3
"""A character that is not complete yet shows as one replacement character, or as one for each of its bytes."""
CONTEXT_LIMIT_TOKENS = 64

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
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
    """One request's text. `decode` turns token ids into text and leaves special tokens out.

    Only a window is decoded: the tokens that are not final yet, behind a few that are. Those in front are there because
    many tokenizers write a token differently at the start of a text.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = StopStrings(stops)
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._pending_chars = 0

    def push(self, token_id: int) -> Piece:
        """What may leave after one more token. Not to be called again after a stop."""
        self._pending.append(token_id)
        new, is_settled = self._new_text()
        final = _without_open_character(new) if is_settled else ""
        piece = self._stops.push(final[self._pending_chars :])
        self._pending_chars = max(self._pending_chars, len(final))
        if final == new:
            self._settle(visible=bool(new))
        return piece

    def flush(self) -> Piece:
        """What was held back, when no more tokens come. An incomplete character is shown as what it decodes to."""
        new, _ = self._new_text()
        piece = self._stops.push(new[self._pending_chars :])
        self._pending_chars = len(new)
        return piece if piece.stop is not None else Piece(piece.text + self._stops.flush())

    def _new_text(self) -> tuple[str, bool]:
        """What the pending tokens add, and whether it can be told from the context.

        Byte-fallback decoders write a whole run of bytes as replacement characters until it is valid, the part in the
        context included.
        """
        text = self._decode(self._context + self._pending)
        is_settled = text.startswith(self._context_text) or not text.endswith(REPLACEMENT)
        return text[len(self._context_text) :], is_settled

    def _settle(self, *, visible: bool) -> None:
        """The pending tokens are final: they become the context of the next ones."""
        self._context = self._pending if visible else (self._context + self._pending)[-CONTEXT_LIMIT_TOKENS:]
        self._context_text = self._decode(self._context)
        self._pending = []
        self._pending_chars = 0


def _without_open_character(text: str) -> str:
    end = len(text)
    while end > 0 and len(text) - end < UTF8_TAIL_BYTES and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]

"""Which bytes a token stands for, by the decoder that a `tokenizer.json` names, and how one is spelled alone. Pure.

Two families cover the models served here. Byte-level vocabularies (GPT-2 and after) write every byte as one character
of an alphabet; vocabularies made by SentencePiece write text with U+2581 for a space, and bytes without a piece of
their own as `<0xE4>`. In both a token always stands for the same bytes, which is what makes exact streaming possible.
One difference from the library's own decoder is meant: where a run of `<0x..>` tokens is not valid UTF-8 as a whole,
that one replaces all of it, this one what is wrong in it, as SentencePiece does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


_KNOWN = "ByteLevel, or a sequence of Replace, Metaspace, ByteFallback, Fuse and a Strip of leading spaces"


class UnknownDecoder(ValueError):
    """The decoder does something to tokens that cannot be done to each of them alone."""


@dataclass(frozen=True)
class TokenCoding:
    """`to_bytes` takes a token as the vocabulary spells it. `leading_spaces`: see `TokenText`."""

    to_bytes: Callable[[str], bytes]
    leading_spaces: int = 0


@dataclass(frozen=True, slots=True)
class Spelling:
    """A token by itself. `text` is unambiguous: bytes that are no UTF-8 stand in it as `bytes:\\xf0\\x9f`."""

    text: str
    data: bytes


def spelling_of(data: bytes) -> Spelling:
    try:
        return Spelling(data.decode(), data)
    except UnicodeDecodeError:
        return Spelling("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data)


def read_decoder(decoder: Mapping[str, Any] | None) -> TokenCoding:
    """The coding of a `decoder` object of `tokenizer.json`. Raises UnknownDecoder, which names the step at fault."""
    if decoder is None:
        raise UnknownDecoder("it has no decoder, so its tokens cannot be joined to a text")
    steps: Sequence[Mapping[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return TokenCoding(_from_alphabet)
    replaced: list[tuple[str, str]] = []
    has_bytes, leading_spaces = False, 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replaced.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replaced.append((old, " "))
                leading_spaces = int(step.get("prepend_scheme", "always") != "never")
            case {"type": "ByteFallback"}:
                has_bytes = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                leading_spaces = start
            case _:
                known = (
                    "ByteLevel, or a sequence of Replace, Metaspace, ByteFallback, Fuse and a Strip of leading spaces"
                )
                raise UnknownDecoder(f"its decoder has a step {str(dict(step))[:120]}; needed is {known}")
    return TokenCoding(_of_pieces(replaced, has_bytes), leading_spaces)


def _of_pieces(replaced: Sequence[tuple[str, str]], has_bytes: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        return bytes([int(byte[1], 16)]) if byte else token.encode()

    return to_bytes


def _alphabet() -> dict[int, int]:
    """Code point to byte (GPT-2): printable bytes are themselves, the others follow from U+0100 on in their order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: byte for byte in printable}, **{0x100 + place: byte for place, byte in enumerate(others)}}


_BYTE_OF = _alphabet()


def _from_alphabet(token: str) -> bytes:
    """A token with a character outside of the alphabet was added to the vocabulary as plain text."""
    try:
        return bytes([_BYTE_OF[ord(char)] for char in token])
    except KeyError:
        return token.encode()

"""Streamed text is the whole text for the vocabularies of real models, whatever their tokens are."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer as FastTokenizer

from hpu_engine.text.detokenizer import REPLACEMENT, Detokenizer
from hpu_engine.text.tokenizer import Tokenizer
from tests.models.smollm2 import smollm2
from tests.models.vocabularies import VOCABULARIES, vocabulary

TEXT = (
    "A stream is the text: nothing more.\n\tdef f(x): return x ** 2  # ok\r\n"
    "Le café déjà vu, Příliš žluťoučký kůň, Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย\n"
    "你好，世界。今日は🙂🚀 👩‍👩‍👧‍👦 🏳️‍🌈 한국어 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠜎𠜱 鱻 \u200b\ufeff e\u0301 <s> </s> <|endoftext|>"
)


@dataclass(frozen=True)
class Vocabulary:
    fast: FastTokenizer
    ours: Tokenizer
    odd_ids: tuple[int, ...]
    """Special and added tokens, tokens that are no characters of their own, and an id beyond the end."""

    def streamed(self, token_ids: list[int], *, skip: bool = True, stops: tuple[str, ...] = ()) -> Iterator[str]:
        detokenizer = Detokenizer(self.ours.text_of_tokens(skip_special_tokens=skip), stops)
        for token_id in token_ids:
            piece = detokenizer.push(token_id)
            yield piece.text
            if piece.stop is not None:
                return
        yield detokenizer.flush().text

    def whole(self, token_ids: list[int], *, skip: bool = True) -> str:
        """By the library. In a run of `<0x..>` tokens that is not all valid it replaces what is valid, too; there the
        text is that of the pieces' bytes.
        """
        text: str = self.fast.decode(token_ids, skip_special_tokens=skip)
        if REPLACEMENT not in text or not self.has_byte_tokens:
            return text
        special = {number for number, token in self.fast.get_added_tokens_decoder().items() if token.special}
        pieces = [self.fast.id_to_token(number) or "" for number in token_ids if not (skip and number in special)]
        data = b"".join(
            bytes([int(piece[3:5], 16)]) if re.fullmatch("<0x..>", piece) else piece.replace("▁", " ").encode()
            for piece in pieces
        )
        return data.removeprefix(b" ").decode(errors="replace")

    @property
    def has_byte_tokens(self) -> bool:
        return self.fast.token_to_id("<0xE4>") is not None


@pytest.fixture(scope="module", params=["smollm2", *VOCABULARIES])
def real(request: pytest.FixtureRequest) -> Vocabulary:
    file = smollm2() / "tokenizer.json" if request.param == "smollm2" else vocabulary(request.param)
    fast = FastTokenizer.from_file(str(file))
    ours = Tokenizer(fast, None)
    size = fast.get_vocab_size()
    draw = random.Random(1)
    torn = [number for number in draw.sample(range(size), 20_000) if ours.spell(number).text.startswith("bytes:")]
    byte_tokens = [fast.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    torn += [number for number in byte_tokens if number is not None]
    added = list(fast.get_added_tokens_decoder())[:64]
    assert torn, "no token is a part of a character; the tests below would prove little"
    return Vocabulary(fast, ours, (*torn, *added, size + 7))


def sequences(real: Vocabulary, count: int) -> Iterator[list[int]]:
    """Random ids, then mostly those that are no characters of their own, then pieces of encoded texts put together."""
    draw = random.Random(2)
    size = real.fast.get_vocab_size()
    encoded = real.fast.encode(TEXT, add_special_tokens=False).ids
    for number in range(count):
        length = draw.randrange(1, 25)
        match number % 3:
            case 0:
                yield [draw.randrange(size) for _ in range(length)]
            case 1:
                yield [
                    draw.choice(real.odd_ids) if draw.random() < 0.8 else draw.randrange(size) for _ in range(length)
                ]
            case _:
                cuts = [draw.randrange(len(encoded)) for _ in range(4)]
                yield [token for cut in cuts for token in encoded[cut : cut + draw.randrange(1, 8)]]


@pytest.mark.parametrize("skip", [True, False])
def test_any_tokens_stream_to_the_whole_text(real: Vocabulary, skip: bool) -> None:
    replaced = 0
    for token_ids in sequences(real, 600):
        whole = real.whole(token_ids, skip=skip)
        assert "".join(real.streamed(token_ids, skip=skip)) == whole, token_ids
        replaced += REPLACEMENT in whole
    assert replaced > 50, "hardly a sequence was torn; this proves little"


def test_a_character_leaves_with_its_last_byte_and_never_torn(real: Vocabulary) -> None:
    token_ids = real.fast.encode(TEXT, add_special_tokens=False).ids
    whole = real.whole(token_ids)
    assert REPLACEMENT not in whole
    shown, data = "", b""
    lead = real.ours.text_of_tokens(skip_special_tokens=True).leading_spaces
    for token_id, piece in zip(token_ids, real.streamed(token_ids), strict=False):
        shown += piece
        data += real.ours.text_of_tokens(skip_special_tokens=True).bytes_of(token_id)
        complete = data.removeprefix(b" " * lead).decode(errors="ignore")
        assert shown == complete
    assert shown == whole


def test_text_stops_before_any_stop_string_and_waits_for_no_other_reason(real: Vocabulary) -> None:
    draw = random.Random(3)
    for token_ids in sequences(real, 150):
        whole = real.whole(token_ids)
        if len(whole) < 4:
            continue
        start = draw.randrange(len(whole) - 1)
        inside = whole[start : start + draw.randrange(1, 9)]
        stops = (inside, whole[start] + "\x00never", "\x00never")
        tokens = real.ours.text_of_tokens(skip_special_tokens=True)
        stopping, free = Detokenizer(tokens, stops), Detokenizer(tokens)
        shown = complete = ""
        stop = None
        for token_id in token_ids:
            piece = stopping.push(token_id)
            shown, stop, complete = shown + piece.text, piece.stop, complete + free.push(token_id).text
            if stop is not None:
                break
            held = complete[len(shown) :]
            assert complete == shown + held
            assert held == "" or any(stop.startswith(held) for stop in stops)
        if stop is None:
            piece = stopping.flush()
            shown, stop = shown + piece.text, piece.stop
        assert (shown, stop) == (whole[: whole.index(inside)], inside), token_ids


def test_spelled_alone_a_token_is_its_bytes(real: Vocabulary) -> None:
    """The bytes in log-probabilities, joined, are those of the text."""
    token_ids = real.fast.encode(TEXT, add_special_tokens=False).ids
    joined = b"".join(real.ours.spell(token_id).data for token_id in token_ids)
    lead = real.ours.text_of_tokens(skip_special_tokens=False).leading_spaces
    assert joined.decode().removeprefix(" " * lead) == real.whole(token_ids, skip=False)
    for token_id in real.odd_ids:
        spelling = real.ours.spell(token_id)
        assert spelling.text.startswith("bytes:") or spelling.text.encode() == spelling.data

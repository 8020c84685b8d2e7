"""Streamed text is the whole text, characters are never torn, stop strings never leak and hold nothing back in vain."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from hpu_engine.text.detokenizer import REPLACEMENT, Detokenizer, StopStrings
from hpu_engine.text.tokenizer import Tokenizer


def byte_level() -> FastTokenizer:
    """One token a byte, and a few longer ones, two of which end or begin inside a character."""
    to_char = bytes_to_unicode()
    tokens = [to_char[byte] for byte in range(256)]
    for text in (
        b"the",
        b" cat",
        "é".encode(),
        "🙂".encode()[:2],
        "🙂".encode()[2:],
        "你".encode() + "好".encode()[:1],
    ):
        tokens.append("".join(to_char[byte] for byte in text))
    tokenizer = FastTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def bytes_to_unicode() -> dict[int, str]:
    """The byte-level alphabet (GPT-2): printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def sentencepiece_like() -> FastTokenizer:
    """Metaspace with byte fallback and the leading space stripped: a token reads differently at the start of a text."""
    tokens = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "▁the", "▁cat", "s", "at"]
    tokenizer = FastTokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def streamed(
    fast: FastTokenizer, token_ids: list[int], stops: tuple[str, ...] = (), **options: Any
) -> tuple[list[str], str | None]:
    tokens = Tokenizer(fast, None).text_of_tokens(skip_special_tokens=True)
    detokenizer = Detokenizer(tokens, stops, **options)
    pieces = []
    for token_id in token_ids:
        piece = detokenizer.push(token_id)
        pieces.append(piece.text)
        assert detokenizer.num_shown == sum(map(len, pieces)) <= detokenizer.num_chars
        if piece.stop is not None:
            return pieces, piece.stop
    last = detokenizer.flush()
    return [*pieces, last.text], last.stop


BYTES = byte_level()
PIECES = sentencepiece_like()


def id_of(piece: str) -> int:
    found = PIECES.token_to_id(piece)
    assert found is not None
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=40))
def test_any_byte_level_tokens_stream_to_exactly_the_whole_text(token_ids: list[int]) -> None:
    pieces, _ = streamed(BYTES, token_ids)
    assert "".join(pieces) == BYTES.decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_a_valid_text_never_shows_a_torn_character(text: str) -> None:
    token_ids = BYTES.encode(text).ids
    pieces, _ = streamed(BYTES, token_ids)
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["▁", "▁the", "▁cat", "s", "at", "你", "🙂", "é"]), max_size=20))
def test_tokens_that_read_differently_at_the_start_stream_to_the_whole_text(words: list[str]) -> None:
    token_ids: list[int] = []
    for word in words:
        known = PIECES.token_to_id(word)
        token_ids += [1 + byte for byte in word.encode()] if known is None else [known]
    pieces, _ = streamed(PIECES, token_ids)
    assert "".join(pieces) == PIECES.decode(token_ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, PIECES.get_vocab_size() - 1), max_size=12))
def test_in_a_run_of_bytes_only_what_is_wrong_is_replaced(token_ids: list[int]) -> None:
    """The library's own decoder replaces the whole run, what was right in it too; otherwise both agree."""
    text = "".join(streamed(PIECES, token_ids)[0])
    library = PIECES.decode(token_ids)
    if REPLACEMENT in library:
        assert len(text) <= len(library)
    else:
        assert text == library


def test_a_wrong_byte_behind_a_character_takes_nothing_back() -> None:
    good, wrong = [1 + byte for byte in "你".encode()], [1 + 0xFF]
    the = id_of("▁the")
    assert streamed(PIECES, [*good, *wrong, the])[0] == ["", "", "你", REPLACEMENT, " the", ""]


def test_a_text_behind_a_prompt_keeps_its_first_space() -> None:
    cat = id_of("▁cat")
    assert streamed(PIECES, [cat, cat])[0] == ["cat", " cat", ""]
    assert streamed(PIECES, [cat, cat], continues=True)[0] == [" cat", " cat", ""]


def test_stop_strings_count_behind_the_tokens_that_cannot_stop() -> None:
    token_ids = BYTES.encode("abcabcabc").ids
    assert streamed(BYTES, token_ids, ("bc",)) == (["a", "", ""], "bc")
    pieces, stop = streamed(BYTES, token_ids, ("bc",), stops_after=2)
    assert ("".join(pieces), stop) == ("abca", "bc"), "a stop string lies whole behind those tokens"


def test_a_stop_string_does_not_count_in_what_comes_out_at_the_end_either() -> None:
    token_ids = [*BYTES.encode("a").ids, 0xF0]
    assert streamed(BYTES, token_ids, (REPLACEMENT,)) == (["a", "", ""], REPLACEMENT)
    assert streamed(BYTES, token_ids, (REPLACEMENT,), stops_after=5) == (["a", "", REPLACEMENT], None)


def test_a_split_emoji_appears_with_its_last_token() -> None:
    first, second = len(bytes_to_unicode()) + 3, len(bytes_to_unicode()) + 4
    assert BYTES.decode([first, second]) == "🙂"
    assert streamed(BYTES, [first, second])[0] == ["", "🙂", ""]


def test_bytes_that_never_become_a_character_come_out_at_the_end() -> None:
    assert streamed(BYTES, [*BYTES.encode("a").ids, 0xF0])[0] == ["a", "", REPLACEMENT]


ALPHABET = st.text("abc", max_size=14)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def cut_reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the text ends the moment it ends with a stop string, the longest of them."""
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end - max(map(len, matched))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(ALPHABET, STOPS, st.integers(0, 2**32))
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut_into_pieces(
    text: str, stops: list[str], seed: int
) -> None:
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=3))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    machine, out, stopped = StopStrings(stops), "", False
    for chunk in chunks:
        piece = machine.push(chunk)
        out += piece.text
        if piece.stop is not None:
            stopped = True
            break
    else:
        out += machine.flush()
    assert (out, stopped) == cut_reference(text, stops)


@settings(max_examples=300, deadline=None)
@given(ALPHABET, STOPS)
def test_text_waits_only_while_it_is_the_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    machine, out = StopStrings(stops), ""
    for end in range(1, len(text) + 1):
        piece = machine.push(text[end - 1])
        out += piece.text
        if piece.stop is not None:
            return
        held = text[len(out) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_across_tokens_does_not_leak_and_nothing_else_is_delayed() -> None:
    token_ids = BYTES.encode("Paris.\nxyz tail").ids
    pieces, stop = streamed(BYTES, token_ids, ("xyz",))
    assert (pieces, stop) == ([*"Paris.\n", "", "", ""], "xyz")


def test_a_stop_string_made_of_the_last_incomplete_character_still_stops() -> None:
    pieces, stop = streamed(BYTES, [*BYTES.encode("a").ids, 0xF0], (REPLACEMENT,))
    assert ("".join(pieces), stop) == ("a", REPLACEMENT)


@pytest.mark.parametrize("count", [1, 200])
def test_special_tokens_are_no_text_and_cost_no_context(count: int) -> None:
    special = BYTES.get_vocab_size() - 1
    a = BYTES.encode("a").ids
    pieces, _ = streamed(BYTES, [*a, *[special] * count, *a])
    assert "".join(pieces) == "aa"

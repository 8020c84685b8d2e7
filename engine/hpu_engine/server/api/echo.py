"""The prompt as a part of a completion's text, where `echo` asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from hpu_engine.server.api.logprobs import ScoredToken
from hpu_engine.server.api.prompts import Prompt
from hpu_engine.server.api.protocol import CompletionRequest
from hpu_engine.server.errors import ApiError
from hpu_engine.text.detokenizer import Detokenizer
from hpu_engine.text.tokenizer import Tokenizer
from hpu_engine.wire.messages import TokenLogprobs


@dataclass(frozen=True)
class Echo:
    """A prompt's text, its tokens, and where in the text each of them begins."""

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]

    def scored(self, scores: Sequence[TokenLogprobs]) -> tuple[ScoredToken, ...]:
        """`scores` are those of the second token and on. Raises `ApiError` 500 where the engine left some out."""
        if len(scores) != len(self.token_ids) - 1:
            raise ApiError(500, f"the engine scored {len(scores) + 1} of the prompt's {len(self.token_ids)} tokens")
        each = zip(self.token_ids, chain((None,), scores), self.offsets, strict=True)
        return tuple(ScoredToken(token_id, own, offset) for token_id, own, offset in each)


def echo_of(given: Prompt, token_ids: tuple[int, ...], request: CompletionRequest, tokenizer: Tokenizer) -> Echo:
    """A text is echoed as it was given, token ids as the text that they are."""
    if isinstance(given, str):
        return _of_text(given, token_ids, request, tokenizer)
    return _of_tokens(token_ids, request, tokenizer)


def _of_text(given: str, token_ids: tuple[int, ...], request: CompletionRequest, tokenizer: Tokenizer) -> Echo:
    if request.logprobs is None:
        return Echo(given, token_ids, (0,) * len(token_ids))
    return Echo(given, token_ids, tokenizer.offsets(given, add_special_tokens=request.add_special_tokens))


def _of_tokens(token_ids: tuple[int, ...], request: CompletionRequest, tokenizer: Tokenizer) -> Echo:
    detokenizer = Detokenizer(tokenizer.text_of_tokens(skip_special_tokens=request.skip_special_tokens))
    text, offsets = "", []
    for token_id in token_ids:
        offsets.append(detokenizer.num_chars)
        text += detokenizer.push(token_id).text
    return Echo(text + detokenizer.flush().text, token_ids, tuple(offsets))

"""Log-probabilities as the two routes write them. Pure: tokens and numbers in, the response's objects out.

A token is spelled by itself (`Tokenizer.spell`), so that the tokens' bytes joined are the text's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpu_engine.server.api.responses import (
    ChatLogprobs,
    ChatToken,
    CompletionLogprobs,
    LikelyToken,
    PromptLogprob,
    PromptLogprobs,
)
from hpu_engine.text.token_bytes import Spelling
from hpu_engine.wire.messages import TokenLogprobs

Spell = Callable[[int], Spelling]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a text: its scores (None for the first of a prompt), and the character where it begins."""

    token_id: int
    scores: TokenLogprobs | None
    offset: int


def completion_logprobs(tokens: Sequence[ScoredToken], count: int, spell: Spell) -> CompletionLogprobs:
    """With the `count` most likely tokens at each place, and the token itself where it is not among them."""
    return CompletionLogprobs(
        text_offset=tuple(token.offset for token in tokens),
        token_logprobs=tuple(None if token.scores is None else token.scores.logprob for token in tokens),
        tokens=tuple(spell(token.token_id).text for token in tokens),
        top_logprobs=tuple(None if token.scores is None else _by_text(token.scores, count, spell) for token in tokens),
    )


def _by_text(scores: TokenLogprobs, count: int, spell: Spell) -> dict[str, float]:
    """Of two tokens that are spelled alike the more likely one is shown."""
    likely: dict[str, float] = {}
    for token_id, logprob in (*scores.top[:count], (scores.token_id, scores.logprob)):
        likely.setdefault(spell(token_id).text, logprob)
    return likely


def chat_logprobs(tokens: Sequence[ScoredToken], count: int, spell: Spell) -> ChatLogprobs:
    """With the `count` most likely tokens at each place."""
    content = []
    for token in tokens:
        if token.scores is not None:
            own = _likely(token.token_id, token.scores.logprob, spell)
            top = tuple(_likely(*one, spell) for one in token.scores.top[:count])
            content.append(ChatToken(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content=tuple(content))


def _likely(token_id: int, logprob: float, spell: Spell) -> LikelyToken:
    spelling = spell(token_id)
    return LikelyToken(spelling.text, logprob, tuple(spelling.data))


def prompt_logprobs(scores: Sequence[TokenLogprobs], count: int, spell: Spell) -> PromptLogprobs:
    """`scores` are those of the prompt's second token and on."""
    return (None, *(_by_id(one, count, spell) for one in scores))


def _by_id(scores: TokenLogprobs, count: int, spell: Spell) -> dict[str, PromptLogprob]:
    likely = {
        str(token_id): PromptLogprob(logprob, rank, spell(token_id).text)
        for rank, (token_id, logprob) in enumerate(scores.top[:count], 1)
    }
    likely.setdefault(str(scores.token_id), PromptLogprob(scores.logprob, None, spell(scores.token_id).text))
    return likely

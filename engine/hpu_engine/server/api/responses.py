"""What clients get back: the bodies of OpenAI's completion, chat and model objects. Encoded by msgspec, null kept.

Field names and order are the wire format's. `stop_reason` is vLLM's addition: the stop string or token id that hit.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length"]


class Usage(msgspec.Struct, frozen=True):
    """Tokens. `completion_tokens` counts those up to the one that ended the text, none that came after it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage_of(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry per token in each list. `text_offset` is where in the choice's text a token begins, in characters.

    The first token of an echoed prompt has no log-probability: nothing stands before it.
    """

    text_offset: tuple[int, ...]
    token_logprobs: tuple[float | None, ...]
    tokens: tuple[str, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]


class PromptLogprob(msgspec.Struct, frozen=True):
    """vLLM's form. `rank` is 1 for the most likely token, null for one that is not among the likely ones asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = tuple[dict[str, PromptLogprob] | None, ...]
"""One entry per prompt token, by token id; null for the first."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, and a chunk of a streamed one: the format is the same."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class LikelyToken(msgspec.Struct, frozen=True):
    """`bytes` are the token's own; `token` spells them, as `bytes:\\xf0\\x9f` where they are not whole characters."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatToken(LikelyToken, frozen=True):
    top_logprobs: tuple[LikelyToken, ...]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: tuple[ChatToken, ...]
    refusal: None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hpu-inference"
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[Model, ...]


encode = msgspec.json.Encoder().encode

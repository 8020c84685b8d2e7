"""`POST /v1/chat/completions`: a conversation in, the assistant's turn out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from msgspec import UNSET, UnsetType

from hpu_engine.server.api.answering import Head, new_head, respond
from hpu_engine.server.api.logprobs import Spell, chat_logprobs, prompt_logprobs
from hpu_engine.server.api.parsing import parse_object
from hpu_engine.server.api.prompting import render
from hpu_engine.server.api.protocol import ChatCompletionRequest, read_chat
from hpu_engine.server.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    PromptLogprobs,
    Usage,
    encode,
)
from hpu_engine.server.errors import bad_request
from hpu_engine.server.model_files import LoadedModel
from hpu_engine.server.requests.response_stream import ResponseStream
from hpu_engine.server.requests.sequence import Delta
from hpu_engine.server.requests.sequence_request import (
    SequenceRequest,
    check_for_model,
    check_scores,
    encode_prompt,
    make_sequence_request,
    output_limit,
)
from hpu_engine.server.requests.serving_model import SERVING, ServingModel, prepare, read_body
from hpu_engine.text.chat_template import ChatTemplate


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    serving = request.app[SERVING]
    model = serving.model()
    body = await read_body(request)
    parsed, turns, template = await prepare(body, _read, body, serving, model)
    prompt = await render(parsed, turns, template)
    wanted = await prepare(prompt, _wanted, prompt, parsed, serving, model)
    head = new_head("chatcmpl", serving.name, include_usage=parsed.include_usage)
    async with serving.admission.open([wanted]) as answer:
        form = _Form(head, parsed, answer, model.tokenizer.spell)
        return await respond(request, answer, form, stream=parsed.stream, include_usage=parsed.include_usage)


def _read(
    data: bytes, serving: ServingModel, model: LoadedModel
) -> tuple[ChatCompletionRequest, list[dict[str, Any]], ChatTemplate]:
    """What a body asks for, its turns, and the template that is to render them. Raises `ApiError`."""
    parsed = read_chat(parse_object(data))
    serving.check_model_name(parsed.model)
    check_for_model(parsed, 1, model, serving.admission.max_open)
    template = model.tokenizer.chat_template
    if template is None:
        raise bad_request("messages", "this model has no chat template; use /v1/completions")
    turns = [message.for_template(f"messages[{place}]") for place, message in enumerate(parsed.messages)]
    return parsed, turns, template


def _wanted(prompt: str, parsed: ChatCompletionRequest, serving: ServingModel, model: LoadedModel) -> SequenceRequest:
    """The template writes the special tokens itself, so the tokenizer adds none unless told to. Raises `ApiError`."""
    limits = serving.admission.limits
    special = parsed.add_special_tokens
    token_ids = encode_prompt(prompt, model.tokenizer, limits, param="messages", add_special_tokens=special)
    limit = output_limit(len(token_ids), parsed.output_limit, None, limits, least=parsed.min_tokens, param="messages")
    check_scores(parsed, [token_ids], [limit], limits.max_model_len)
    return make_sequence_request(token_ids, parsed, limit, model, continues=False, prompt_field="messages")


@dataclass(frozen=True)
class _Form:
    """A chat's bodies."""

    head: Head
    request: ChatCompletionRequest
    answer: ResponseStream
    spell: Spell

    def whole(self, sequences: Sequence[Delta], usage: Usage) -> bytes:
        choices = tuple(
            ChatChoice(
                index=sequence.index,
                message=AssistantMessage(content=sequence.text),
                logprobs=self._logprobs(sequence),
                finish_reason=sequence.finish,
                stop_reason=sequence.stop_reason,
            )
            for sequence in sequences
        )
        head, prompt = self.head, self._prompt_logprobs()
        return encode(
            ChatCompletion(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=usage,
                prompt_logprobs=prompt,
            )
        )

    def opening(self) -> Iterable[bytes]:
        role = ChatDelta(role="assistant", content="")
        return (self._chunk((ChatChunkChoice(index=index, delta=role),)) for index in range(self.request.n))

    def has_prompt(self, _: Delta) -> bool:
        return False

    def chunk(self, delta: Delta) -> bytes:
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish,
            stop_reason=delta.stop_reason,
        )
        return self._chunk((choice,))

    def last(self, usage: Usage) -> bytes:
        return self._chunk((), usage)

    def _chunk(self, choices: tuple[ChatChunkChoice, ...], usage: Usage | None = None) -> bytes:
        head = self.head
        shown = head.no_usage if usage is None else usage
        return encode(ChatChunk(id=head.id, created=head.created, model=head.model, choices=choices, usage=shown))

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(delta.tokens, self.request.top_logprobs, self.spell) if self.request.logprobs else None

    def _prompt_logprobs(self) -> PromptLogprobs | UnsetType:
        count = self.request.prompt_logprobs
        return UNSET if count is None else prompt_logprobs(self.answer.prompt_scores(0), count, self.spell)

"""`POST /v1/chat/completions`: a conversation in, the assistant's turn out."""

from __future__ import annotations

import time
import uuid

from aiohttp import web
from msgspec import UNSET, UnsetType

from hpu_engine.server.chat_template import TemplateRefused
from hpu_engine.server.errors import ApiError, bad_request
from hpu_engine.server.generation import Answer, Delta
from hpu_engine.server.protocol import ChatCompletionRequest, parse_object, read_chat
from hpu_engine.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Usage,
    encode,
    usage_of,
)
from hpu_engine.server.serving import (
    SERVING,
    LoadedModel,
    encode_prompt,
    json_response,
    make_jobs,
    output_limit,
    read_body,
)
from hpu_engine.server.sse import EventStream


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    serving = request.app[SERVING]
    model = serving.model()
    parsed = read_chat(parse_object(await read_body(request)))
    serving.check_model_name(parsed.model)
    limits = serving.engine.limits
    prompt = await encode_prompt(
        _render(parsed, model), model.tokenizer, limits, param="messages", add_special_tokens=False
    )
    limit = output_limit(len(prompt), parsed.output_limit, None, limits, param="messages")
    head = _Head(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), serving.name)
    async with serving.engine.open(make_jobs([prompt], parsed, [limit], model)) as answer:
        if parsed.stream:
            return await _stream(request, head, answer, include_usage=parsed.include_usage)
        return await _whole(head, answer)


def _render(request: ChatCompletionRequest, model: LoadedModel) -> str:
    """The template writes the special tokens itself, which is why the tokenizer adds none."""
    template = model.tokenizer.chat_template
    if template is None:
        raise bad_request("messages", "this model has no chat template; use /v1/completions")
    turns = [message.for_template() for message in request.messages]
    try:
        return template.render(
            turns, add_generation_prompt=request.add_generation_prompt, variables=request.chat_template_kwargs
        )
    except TemplateRefused as error:
        raise bad_request("messages", str(error)) from None


class _Head:
    """What every body of one answer begins with."""

    def __init__(self, answer_id: str, created: int, model: str) -> None:
        self._id, self._created, self._model = answer_id, created, model

    def whole(self, choice: ChatChoice, usage: Usage) -> bytes:
        return encode(
            ChatCompletion(id=self._id, created=self._created, model=self._model, choices=(choice,), usage=usage)
        )

    def chunk(self, choices: tuple[ChatChunkChoice, ...], *, usage: Usage | UnsetType | None) -> bytes:
        return encode(ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage))


async def _whole(head: _Head, answer: Answer) -> web.Response:
    text = ""
    async for delta in answer.deltas():
        text += delta.text
    choice = ChatChoice(
        index=0,
        message=AssistantMessage(content=text),
        finish_reason=delta.finish,
        stop_reason=delta.stop_reason,
    )
    return json_response(head.whole(choice, usage_of(answer.prompt_tokens, answer.output_tokens)))


async def _stream(request: web.Request, head: _Head, answer: Answer, *, include_usage: bool) -> web.StreamResponse:
    deltas = answer.deltas()
    first = await anext(deltas)  # a request that never runs gets its error as a status, not as an event
    events = EventStream(request)
    await events.begin()
    no_usage = None if include_usage else UNSET

    async def show(delta: Delta) -> None:
        content = ChatDelta(content=delta.text) if delta.text else ChatDelta()
        choice = ChatChunkChoice(index=0, delta=content, finish_reason=delta.finish, stop_reason=delta.stop_reason)
        await events.send(head.chunk((choice,), usage=no_usage))

    try:
        role = ChatChunkChoice(index=0, delta=ChatDelta(role="assistant", content=""))
        await events.send(head.chunk((role,), usage=no_usage))
        await show(first)
        async for delta in deltas:
            await show(delta)
    except ApiError as error:
        await events.end_with(error)
        return events.response
    if include_usage:
        await events.send(head.chunk((), usage=usage_of(answer.prompt_tokens, answer.output_tokens)))
    await events.end()
    return events.response

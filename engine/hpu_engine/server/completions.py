"""`POST /v1/completions`: raw prompts, as text or token ids, one or many."""

from __future__ import annotations

import time
import uuid

from aiohttp import web
from msgspec import UNSET, UnsetType

from hpu_engine.server.errors import ApiError
from hpu_engine.server.generation import Answer, Delta
from hpu_engine.server.protocol import CompletionRequest, parse_object, read_completion, read_prompts
from hpu_engine.server.responses import Completion, CompletionChoice, Usage, encode, usage_of
from hpu_engine.server.serving import (
    SERVING,
    LoadedModel,
    Serving,
    encode_prompt,
    json_response,
    make_jobs,
    output_limit,
    read_body,
)
from hpu_engine.server.sse import EventStream

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: web.Request) -> web.StreamResponse:
    serving = request.app[SERVING]
    model = serving.model()
    body = parse_object(await read_body(request))
    parsed = read_completion(body)
    serving.check_model_name(parsed.model)
    prompts = await _token_ids(body.get("prompt"), parsed, model, serving)
    limits = [
        output_limit(len(prompt), parsed.max_tokens, DEFAULT_MAX_TOKENS, serving.engine.limits) for prompt in prompts
    ]
    head = _Head(f"cmpl-{uuid.uuid4().hex}", int(time.time()), serving.name)
    async with serving.engine.open(make_jobs(prompts, parsed, limits, model)) as answer:
        if parsed.stream:
            return await _stream(request, head, answer, include_usage=parsed.include_usage)
        return await _whole(head, answer, len(prompts))


async def _token_ids(
    value: object, request: CompletionRequest, model: LoadedModel, serving: Serving
) -> list[tuple[int, ...]]:
    limits = serving.engine.limits
    prompts = []
    for given in read_prompts(value, model.description.vocab):
        if isinstance(given, str):
            special = request.add_special_tokens
            ids = await encode_prompt(given, model.tokenizer, limits, param="prompt", add_special_tokens=special)
        else:
            ids = given
        prompts.append(ids)
    return prompts


class _Head:
    """What every body of one answer begins with."""

    def __init__(self, answer_id: str, created: int, model: str) -> None:
        self._id, self._created, self._model = answer_id, created, model

    def body(self, choices: tuple[CompletionChoice, ...], *, usage: Usage | UnsetType | None) -> bytes:
        return encode(Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage))


async def _whole(head: _Head, answer: Answer, prompts: int) -> web.Response:
    texts = [""] * prompts
    last: dict[int, Delta] = {}
    async for delta in answer.deltas():
        texts[delta.index] += delta.text
        if delta.finish is not None:
            last[delta.index] = delta
    choices = tuple(
        CompletionChoice(
            index=index, text=texts[index], finish_reason=last[index].finish, stop_reason=last[index].stop_reason
        )
        for index in range(prompts)
    )
    return json_response(head.body(choices, usage=usage_of(answer.prompt_tokens, answer.output_tokens)))


async def _stream(request: web.Request, head: _Head, answer: Answer, *, include_usage: bool) -> web.StreamResponse:
    deltas = answer.deltas()
    first = await anext(deltas)  # a request that never runs gets its error as a status, not as an event
    events = EventStream(request)
    await events.begin()
    no_usage = None if include_usage else UNSET

    async def show(delta: Delta) -> None:
        choice = CompletionChoice(
            index=delta.index, text=delta.text, finish_reason=delta.finish, stop_reason=delta.stop_reason
        )
        await events.send(head.body((choice,), usage=no_usage))

    try:
        await show(first)
        async for delta in deltas:
            await show(delta)
    except ApiError as error:
        await events.end_with(error)
        return events.response
    if include_usage:
        await events.send(head.body((), usage=usage_of(answer.prompt_tokens, answer.output_tokens)))
    await events.end()
    return events.response

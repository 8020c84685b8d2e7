"""From an engine's answer to an HTTP one, whole or streamed, for both generating routes; they say in which form."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from msgspec import UNSET, UnsetType

from hpu_engine.server.api.responses import Usage
from hpu_engine.server.api.sse import EventStream
from hpu_engine.server.errors import ApiError
from hpu_engine.server.requests.response_stream import ResponseStream
from hpu_engine.server.requests.sequence import Delta
from hpu_engine.server.requests.serving_model import json_response

WRITTEN_INLINE_TOKENS = 256
"""More scored tokens than these are written in a thread: the other streams go on meanwhile."""


@dataclass(frozen=True)
class Head:
    """What every body of one answer begins with. `no_usage`: what a chunk before the last says of usage."""

    id: str
    created: int
    model: str
    no_usage: UnsetType | None


def new_head(kind: str, model: str, *, include_usage: bool) -> Head:
    return Head(f"{kind}-{uuid.uuid4().hex}", int(time.time()), model, None if include_usage else UNSET)


class Form(Protocol):
    """How one route writes one answer. `chunk` sees each sequence's deltas in their order."""

    def whole(self, sequences: Sequence[Delta], usage: Usage) -> bytes: ...

    def opening(self) -> Iterable[bytes]: ...

    def has_prompt(self, delta: Delta) -> bool:
        """Whether the chunk of this one begins with the prompt."""
        ...

    def chunk(self, delta: Delta) -> bytes: ...

    def last(self, usage: Usage) -> bytes: ...


async def respond(
    request: web.Request, answer: ResponseStream, form: Form, *, stream: bool, include_usage: bool
) -> web.StreamResponse:
    """Answer `request`. Raises `ApiError` for an answer that breaks before its first byte is sent."""
    if stream:
        return await _stream(request, answer, form, include_usage=include_usage)
    sequences = await answer.whole()
    if sum(len(sequence.tokens) for sequence in sequences) + answer.num_prompt_scores > WRITTEN_INLINE_TOKENS:
        return json_response(await asyncio.to_thread(form.whole, sequences, answer.usage))
    return json_response(form.whole(sequences, answer.usage))


async def _stream(
    request: web.Request, answer: ResponseStream, form: Form, *, include_usage: bool
) -> web.StreamResponse:
    deltas = answer.deltas()
    first = await anext(deltas)  # a request that never runs gets its error as a status, not as an event
    events = EventStream(request)
    await events.begin()
    try:
        for chunk in form.opening():
            await events.send(chunk)
        await events.send(await _chunk(answer, form, first))
        async for delta in deltas:
            await events.send(await _chunk(answer, form, delta))
    except ApiError as error:
        await events.end_with(error)
        return events.response
    if include_usage:
        await events.send(form.last(answer.usage))
    await events.end()
    return events.response


async def _chunk(answer: ResponseStream, form: Form, delta: Delta) -> bytes:
    if answer.num_prompt_scores > WRITTEN_INLINE_TOKENS and form.has_prompt(delta):
        return await asyncio.to_thread(form.chunk, delta)
    return form.chunk(delta)

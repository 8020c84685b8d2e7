"""A chat's turns to its prompt, without keeping anybody else waiting: the template renders in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpu_engine.server.api.protocol import ChatCompletionRequest
from hpu_engine.server.errors import ApiError, bad_request
from hpu_engine.text.chat_template import ChatTemplate, TemplateBusy, TemplateRefused

STUCK_SECONDS = 0.5
"""How long a chat waits for its turn while no other is rendered: one in front of it is being stopped."""


async def render(request: ChatCompletionRequest, turns: Sequence[Mapping[str, Any]], template: ChatTemplate) -> str:
    """The prompt. Raises `ApiError` 400 where the template refuses the turns, and 429 where too many chats wait."""
    try:
        rendering = template.start(
            turns,
            add_generation_prompt=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
            documents=request.documents or None,
        )
        waiting = asyncio.wrap_future(rendering)
        while not (await asyncio.wait({waiting}, timeout=STUCK_SECONDS))[0]:
            if time.monotonic() - template.rendered_at > STUCK_SECONDS and rendering.cancel():
                raise TemplateBusy
        return await waiting
    except TemplateRefused as error:
        raise bad_request("messages", str(error)) from None
    except TemplateBusy:
        raise ApiError(
            429, "too many chats wait for the model's chat template", code="overloaded", retry_after_seconds=1
        ) from None

"""One streamed question to an OpenAI endpoint: the words as they come, and how fast they came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from openai import OpenAI


@dataclass(frozen=True)
class Answer:
    """What came back. `tokens` is the server's count; the rate is over the time after the first one."""

    text: str
    tokens: int
    first_token_seconds: float
    total_seconds: float

    @property
    def tokens_per_second(self) -> float:
        after_first = self.total_seconds - self.first_token_seconds
        return (self.tokens - 1) / after_first if self.tokens > 1 and after_first > 0 else 0.0


def ask(url: str, model: str, question: str, *, max_tokens: int, write: Callable[[str], None]) -> Answer:
    """Ask `model` behind `url` (".../v1"), streaming. Raises what the openai client raises."""
    client = OpenAI(base_url=url, api_key="none", timeout=120, max_retries=0)
    started = time.monotonic()
    first = None
    pieces: list[str] = []
    tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or time.monotonic()
                pieces.append(choice.delta.content)
                write(choice.delta.content)
    ended = time.monotonic()
    return Answer("".join(pieces), tokens, (first or ended) - started, ended - started)

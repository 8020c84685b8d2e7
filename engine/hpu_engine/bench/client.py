"""One streamed completion, with the time of every chunk; and a workload of them. Bounded in time, count and size.

Greedy, without end-of-sequence, so that every server does the same work. `min_tokens` and `ignore_eos` are extensions
that servers which do not know them ignore; a shorter answer shows in the figures, which count what the server reports.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from hpu_engine.bench.workload import Request, Workload

LINE_LIMIT_BYTES = 1 << 20
ERROR_LIMIT_CHARS = 300


class BenchError(Exception):
    """The server cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are seconds since the workload began. `chunk_times` are of chunks with text, `tokens` as the server says.

    `error` is None for a complete answer.
    """

    kind: str
    sent_at: float
    chunk_times: tuple[float, ...]
    finished_at: float
    prompt_tokens: int
    tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send: `base_url` up to and without `/v1`."""

    base_url: str
    model: str

    def body(self, request: Request) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def served_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The first model the server lists. Raises BenchError."""
    try:
        async with session.get(f"{base_url}/v1/models") as response:
            if response.status != 200:
                raise BenchError(f"{base_url}/v1/models answers {response.status}; an OpenAI-compatible server has 200")
            listed = await response.json()
        return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BenchError(f"no server at {base_url}: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(f"{base_url}/v1/models lists no model") from error


async def run_workload(
    session: aiohttp.ClientSession, target: Target, workload: Workload, limit_seconds: float
) -> tuple[Answer, ...]:
    """Every request's answer, in order. What is still running after `limit_seconds` is cut and reported as an error."""
    places = asyncio.Semaphore(workload.concurrency)
    began = time.perf_counter()

    async def send(request: Request) -> Answer:
        await asyncio.sleep(max(0.0, began + request.start_seconds - time.perf_counter()))
        async with places:
            left = began + limit_seconds - time.perf_counter()
            return await complete(session, target, request, began, left)

    return tuple(await asyncio.gather(*(send(request) for request in workload.requests)))


async def complete(
    session: aiohttp.ClientSession, target: Target, request: Request, began: float, limit_seconds: float
) -> Answer:
    """One streamed completion; whatever goes wrong is in the answer's `error`."""
    stream = _Stream(began)
    sent_at = time.perf_counter() - began
    error: str | None = None
    try:
        async with asyncio.timeout(max(limit_seconds, 0.0)):
            async with session.post(f"{target.base_url}/v1/completions", json=target.body(request)) as response:
                if response.status != 200:
                    error = f"{response.status}: {(await response.text())[:ERROR_LIMIT_CHARS]}"
                else:
                    await stream.read(response.content)
                    error = stream.problem()
    except TimeoutError:
        error = f"not finished within {limit_seconds:.0f} s"
    except (aiohttp.ClientError, OSError) as problem:
        error = f"{type(problem).__name__}: {problem}"[:ERROR_LIMIT_CHARS]
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        error = f"a chunk that is none of a completion: {problem!r}"[:ERROR_LIMIT_CHARS]
    return Answer(
        kind=request.kind,
        sent_at=sent_at,
        chunk_times=tuple(stream.chunk_times),
        finished_at=time.perf_counter() - began,
        prompt_tokens=stream.prompt_tokens,
        tokens=stream.tokens,
        error=error,
    )


class _Stream:
    """Server-sent events of one completion, read to `[DONE]`."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._done = False
        self._error: str | None = None
        self._usage_seen = False
        self.chunk_times: list[float] = []
        self.prompt_tokens = 0
        self.tokens = 0

    async def read(self, content: aiohttp.StreamReader) -> None:
        async for line in content:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    def problem(self) -> str | None:
        if self._error is not None:
            return self._error
        if not self._done:
            return "the stream ended without [DONE]"
        return None if self._usage_seen else "the server reports no usage, so tokens cannot be counted"

    def _take(self, data: bytes) -> None:
        now = time.perf_counter() - self._began
        if data == b"[DONE]":
            self._done = True
            return
        event = json.loads(data)
        if "error" in event:
            self._error = str(event["error"])[:ERROR_LIMIT_CHARS]
        if any(choice.get("text") for choice in event.get("choices") or ()):
            self.chunk_times.append(now)
        usage = event.get("usage")
        if usage:
            self._usage_seen = True
            self.prompt_tokens, self.tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])

"""One sequence on its way to a client: the worker's tokens in, text out, until something ends it.

A `Generation` belongs to one rank (which feeds it) and one `Answer` (which reads it). It ends exactly once: by the
worker's `finish`, by a stop string, by an error, or by being aborted because its reader left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

from hpu_engine.core.detokenizer import Detokenizer
from hpu_engine.core.messages import RowOutput
from hpu_engine.server.errors import ApiError
from hpu_engine.server.metrics import RankMetrics
from hpu_engine.server.responses import FinishReason


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of sequence `index`. The one with a `finish` is the last of its sequence."""

    index: int
    text: str
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


Sink = asyncio.Queue[Delta | ApiError]


class Generation:
    """`sink` holds at most one item a token, so `max_tokens` bounds it even when the client reads nothing."""

    def __init__(
        self,
        *,
        request_id: str,
        index: int,
        prompt_tokens: int,
        detokenizer: Detokenizer,
        shown_stop_ids: frozenset[int],
        sink: Sink,
        metrics: RankMetrics,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        self.is_open = True
        self._detokenizer = detokenizer
        self._shown_stop_ids = shown_stop_ids
        self._sink = sink
        self._metrics = metrics
        self._started = time.monotonic()
        self._first_token: float | None = None
        self._last_token = self._started

    def take(self, row: RowOutput) -> None:
        """Turn a step's tokens into text. A stop string closes the generation though the row has no `finish`."""
        text = ""
        for token_id in row.token_ids:
            self._count_token()
            if row.finish is not None and token_id == row.stop_token_id:
                break  # not part of the text
            piece = self._detokenizer.push(token_id)
            text += piece.text
            if piece.stop is not None:
                self._finish(text, "stop", piece.stop)
                return
        if row.finish is None:
            if text:
                self._sink.put_nowait(Delta(self.index, text))
        elif row.finish == "abort":
            self.fail(ApiError(500, "the engine dropped this request"))
        else:
            self._end_of_tokens(text, row)

    def _end_of_tokens(self, text: str, row: RowOutput) -> None:
        rest = self._detokenizer.flush()
        if rest.stop is not None:
            self._finish(text + rest.text, "stop", rest.stop)
            return
        shown = row.stop_token_id if row.stop_token_id in self._shown_stop_ids else None
        self._finish(text + rest.text, cast(FinishReason, row.finish), shown)

    def _finish(self, text: str, reason: FinishReason, stop_reason: str | int | None) -> None:
        self._close(reason)
        self._sink.put_nowait(Delta(self.index, text, reason, stop_reason))

    def fail(self, error: ApiError) -> None:
        """End with an error. Does nothing when it has ended already."""
        if self.is_open:
            self._close("error")
            self._sink.put_nowait(error)

    def abort(self) -> None:
        """End because nobody reads it any more."""
        if self.is_open:
            self._close("abort")

    def _count_token(self) -> None:
        now = time.monotonic()
        self.output_tokens += 1
        self._metrics.generation_tokens.inc()
        if self._first_token is None:
            self._first_token = now
            self._metrics.first_token.observe(now - self._started)
        else:
            self._metrics.inter_token.observe(now - self._last_token)
        self._last_token = now

    def _close(self, reason: str) -> None:
        self.is_open = False
        metrics = self._metrics
        metrics.finished[reason].inc()
        if reason in ("stop", "length"):
            metrics.end_to_end.observe(time.monotonic() - self._started)
            metrics.request_prompt.observe(self.prompt_tokens)
            metrics.request_output.observe(self.output_tokens)
            if self._first_token is not None and self.output_tokens > 1:
                metrics.per_token.observe((self._last_token - self._first_token) / (self.output_tokens - 1))


class Answer:
    """The sequences of one HTTP request. Leaving the `async with` aborts those that still run, whatever the reason."""

    def __init__(
        self, generations: Sequence[Generation], sink: Sink, release: Callable[[Sequence[Generation]], None]
    ) -> None:
        self._generations = generations
        self._sink = sink
        self._release = release

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(self._generations)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Every sequence's text as it comes, until all have finished. Raises `ApiError` when one is broken."""
        unfinished = len(self._generations)
        while unfinished:
            item = await self._sink.get()
            if isinstance(item, ApiError):
                raise item
            unfinished -= item.finish is not None
            yield item

    @property
    def prompt_tokens(self) -> int:
        return sum(generation.prompt_tokens for generation in self._generations)

    @property
    def output_tokens(self) -> int:
        return sum(generation.output_tokens for generation in self._generations)

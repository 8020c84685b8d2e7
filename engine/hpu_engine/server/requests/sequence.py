"""One sequence on its way to a client: the worker's tokens in, text out, until something ends it.

One rank feeds a `ServedSequence`, one `ResponseStream` reads it. It ends exactly once: by the worker's `finish`, by a
stop string, by an error, or by an abort because its reader left.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

from hpu_engine.server.api.logprobs import ScoredToken
from hpu_engine.server.api.responses import FinishReason
from hpu_engine.server.errors import ApiError
from hpu_engine.server.metrics import RankMetrics
from hpu_engine.text.detokenizer import Detokenizer
from hpu_engine.wire.messages import RowOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of sequence `index`, and its scored tokens. The one with a `finish` is the last of its sequence.

    A token comes with the first character of its text. Tokens that belong to a stop string never come.
    """

    index: int
    text: str
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    tokens: tuple[ScoredToken, ...] = ()


Sink = asyncio.Queue[Delta | ApiError]


class ServedSequence:
    """`sink` holds at most one item a token, so `max_tokens` bounds it even when the client reads nothing.

    `only_prompt`: the one token that the worker cannot do without is neither shown nor counted.
    """

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
        prompt_field: str,
        only_prompt: bool = False,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.prompt_field = prompt_field
        self.output_tokens = 0
        self.is_open = True
        self.prompt_scores: list[TokenLogprobs] = []
        """Of the prompt's second token and on, as they come; complete before the first `Delta`."""
        self._only_prompt = only_prompt
        self._scored: list[ScoredToken] = []
        self._detokenizer = detokenizer
        self._shown_stop_ids = shown_stop_ids
        self._sink = sink
        self._metrics = metrics
        self._started = time.monotonic()
        self._began: float | None = None
        self._first_token: float | None = None
        self._last_token = self._started

    def begin(self, moment: float) -> None:
        """Its first step began at `moment`, a reading of the monotonic clock."""
        self._began = max(moment, self._started)

    def take(self, row: RowOutput) -> None:
        """Turn a step's tokens into text. A stop string closes the sequence though the row has no `finish`."""
        self.prompt_scores.extend(row.prompt_logprobs or ())
        if row.finish == "abort":
            self.fail(ApiError(500, "the engine dropped this request"))
        elif self._only_prompt:
            if row.finish is not None:
                self._finish("", "length", None)
        else:
            self._take_tokens(row)

    def _take_tokens(self, row: RowOutput) -> None:
        text = ""
        for place, token_id in enumerate(row.token_ids):
            self._count_token()
            if row.logprobs is not None:
                self._scored.append(ScoredToken(token_id, row.logprobs[place], self._detokenizer.num_chars))
            if row.finish is not None and token_id == row.stop_token_id:
                break  # not part of the text
            piece = self._detokenizer.push(token_id)
            text += piece.text
            if piece.stop is not None:
                self._finish(text, "stop", piece.stop)
                return
        if row.finish is not None:
            self._end_of_tokens(text, row)
        elif text:
            self._sink.put_nowait(Delta(self.index, text, tokens=self._shown_tokens()))

    def _end_of_tokens(self, text: str, row: RowOutput) -> None:
        rest = self._detokenizer.flush()
        if rest.stop is not None:
            self._finish(text + rest.text, "stop", rest.stop)
            return
        shown = row.stop_token_id if row.stop_token_id in self._shown_stop_ids else None
        scored, self._scored = tuple(self._scored), []
        self._finish(text + rest.text, cast(FinishReason, row.finish), shown, scored)

    def _shown_tokens(self) -> tuple[ScoredToken, ...]:
        """Those whose text has left, at least its beginning."""
        count = 0
        while count < len(self._scored) and self._scored[count].offset < self._detokenizer.num_shown:
            count += 1
        shown = tuple(self._scored[:count])
        del self._scored[:count]
        return shown

    def _finish(
        self,
        text: str,
        reason: FinishReason,
        stop_reason: str | int | None,
        tokens: tuple[ScoredToken, ...] | None = None,
    ) -> None:
        self._close(reason)
        shown = self._shown_tokens() if tokens is None else tokens
        self._sink.put_nowait(Delta(self.index, text, reason, stop_reason, shown))

    def fail(self, error: ApiError) -> None:
        """End with an error. Does nothing when it has ended already."""
        if self.is_open:
            self._close("error")
            self._sink.put_nowait(error)

    def abort(self) -> None:
        """End because its reader left."""
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
            if self._began is not None:
                metrics.queue.observe(self._began - self._started)
            if self._first_token is not None:
                if self._began is not None:
                    metrics.prefill.observe(max(0.0, self._first_token - self._began))
                metrics.decode.observe(self._last_token - self._first_token)
                if self.output_tokens > 1:
                    metrics.per_token.observe((self._last_token - self._first_token) / (self.output_tokens - 1))

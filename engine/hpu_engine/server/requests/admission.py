"""The way from a route to a rank: admission, choice of rank, and the sequences that are open. Knows no HTTP.

Limits are checked here against what the workers said they have, before anything reaches a worker.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from hpu_engine.server.errors import ApiError
from hpu_engine.server.pod.served_rank import ServedRank
from hpu_engine.server.requests.response_stream import ResponseStream
from hpu_engine.server.requests.sequence import ServedSequence, Sink
from hpu_engine.server.requests.sequence_request import SequenceRequest
from hpu_engine.text.detokenizer import Detokenizer
from hpu_engine.wire.messages import Loaded, Submit


class Admission:
    def __init__(self, ranks: Sequence[ServedRank], max_open: int) -> None:
        self.max_open = max_open
        self._ranks = tuple(ranks)
        self._answers = 0
        self._no_answers = asyncio.Event()
        self._no_answers.set()

    @property
    def limits(self) -> Loaded:
        """Of every rank alike. Only once the pod is ready."""
        limits = self._ranks[0].limits
        if limits is None:
            raise AssertionError("limits are asked for before a worker has loaded")
        return limits

    def open(self, requests: Sequence[SequenceRequest]) -> ResponseStream:
        """Start the sequences of one request: requests of equally many samples. Raises `ApiError` 429 when too many are
        open already.
        """
        in_use = sum(rank.open_count for rank in self._ranks)
        if in_use + sum(len(request.params) for request in requests) > self.max_open:
            raise ApiError(
                429,
                f"{in_use} sequences are running or waiting, and at most {self.max_open} may be",
                code="overloaded",
                retry_after_seconds=1,
            )
        rank = min(self._ranks, key=lambda rank: rank.open_count)
        sink: Sink = asyncio.Queue()
        sequences: list[ServedSequence] = []
        for request in requests:
            sequences += self._start(rank, len(sequences), request, sink)
        self._answers += 1
        self._no_answers.clear()

        def release(unread: Sequence[ServedSequence]) -> None:
            rank.release(unread)
            self._answers -= 1
            if not self._answers:
                self._no_answers.set()

        return ResponseStream(sequences, len(requests[0].params), sink, release)

    def _start(self, rank: ServedRank, index: int, request: SequenceRequest, sink: Sink) -> list[ServedSequence]:
        """The samples of one prompt; all share the blocks of the first one's prompt."""
        rank.metrics.prompt_tokens.inc(len(request.prompt))
        samples: list[ServedSequence] = []
        for number, params in enumerate(request.params):
            sequence = ServedSequence(
                request_id=uuid.uuid4().hex,
                index=index + number,
                prompt_tokens=len(request.prompt),
                detokenizer=Detokenizer(
                    request.tokens, request.stops, stops_after=params.min_tokens, continues=request.continues
                ),
                shown_stop_ids=request.shown_stop_ids,
                sink=sink,
                metrics=rank.metrics,
                prompt_field=request.prompt_field,
                only_prompt=request.only_prompt,
            )
            message = Submit(
                request_id=sequence.request_id,
                prompt_token_ids=request.prompt,
                params=params,
                shares_prompt_with=samples[0].request_id if samples else None,
            )
            rank.submit(sequence, message)
            samples.append(sequence)
        return samples

    def fail_all(self, error: ApiError) -> None:
        """End every open sequence with an error."""
        for rank in self._ranks:
            rank.fail_all(error)

    async def wait_until_idle(self) -> None:
        await self._no_answers.wait()

"""The way from a route to a rank: admission, choice of rank, and the sequences that are open. Knows no HTTP.

Limits are checked here against what the workers said they have, before anything reaches a worker.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from hpu_engine.server.errors import ApiError
from hpu_engine.server.pod.pod import Pod
from hpu_engine.server.pod.served_rank import ServedRank
from hpu_engine.server.requests.response_stream import ResponseStream
from hpu_engine.server.requests.sequence import ServedSequence, Sink
from hpu_engine.server.requests.sequence_request import SequenceRequest
from hpu_engine.text.detokenizer import Detokenizer
from hpu_engine.wire.messages import Loaded, Submit


class Admission:
    def __init__(self, pod: Pod, max_open: int) -> None:
        self.max_open = max_open
        self._pod = pod
        self._ranks = pod.ranks
        self._streams = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()

    @property
    def limits(self) -> Loaded:
        """What every rank can hold. Only once the pod is ready."""
        limits = self._pod.limits
        if limits is None:
            raise AssertionError("limits are asked for before all workers have loaded")
        return limits

    def open(self, requests: Sequence[SequenceRequest]) -> ResponseStream:
        """Start the sequences of one request: requests of equally many samples. Raises `ApiError` 429 when too many are
        open already.
        """
        in_use = sum(len(rank.sequences) for rank in self._ranks)
        if in_use + sum(len(request.params) for request in requests) > self.max_open:
            raise ApiError(
                429,
                f"{in_use} sequences are running or waiting, and at most {self.max_open} may be",
                code="overloaded",
                retry_after_seconds=1,
            )
        rank = min(self._ranks, key=lambda rank: len(rank.sequences))
        sink: Sink = asyncio.Queue()
        sequences: list[ServedSequence] = []
        for request in requests:
            sequences += self._start(rank, len(sequences), request, sink)
        self._streams += 1
        self._no_streams.clear()

        def release(unread: Sequence[ServedSequence]) -> None:
            rank.sequences.release(unread)
            self._streams -= 1
            if not self._streams:
                self._no_streams.set()

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
                prompt_token_ids=() if samples else request.prompt,
                params=params,
                shares_prompt_with=samples[0].request_id if samples else None,
            )
            rank.sequences.submit(sequence, message)
            samples.append(sequence)
        return samples

    def fail_all(self, error: ApiError) -> None:
        """End every open sequence with an error."""
        for rank in self._ranks:
            rank.sequences.fail_all(error)

    async def wait_until_idle(self) -> None:
        """Until no rank of the group has anything open: a rank that answers needs the workers of all."""
        await self._no_streams.wait()
        await self._pod.peers_are_idle.wait()

"""The way from a route to a rank: admission, choice of rank, and the sequences that are open. Knows no HTTP.

Limits are checked here against what the workers said they have, before anything reaches a worker.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.server.errors import ApiError
from hpu_engine.server.pod.rank import Rank
from hpu_engine.server.requests.generation import Answer, Generation, Sink
from hpu_engine.text.detokenizer import Detokenizer, TokenText
from hpu_engine.wire.messages import Loaded, Submit


@dataclass(frozen=True)
class Job:
    """One prompt and its samples: `params` has one entry for each, and only the first may score the prompt.

    `continues` says that the text stands behind the prompt's and is no text of its own. `only_prompt`: no output is
    wanted. `shown_stop_ids` are the stop ids the client gave, which it is told about; `prompt_field` is the field that
    it gave the prompt in.
    """

    prompt: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    stops: tuple[str, ...]
    tokens: TokenText
    shown_stop_ids: frozenset[int]
    continues: bool
    prompt_field: str
    only_prompt: bool = False


class Engine:
    def __init__(self, ranks: Sequence[Rank], max_open: int) -> None:
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

    def open(self, jobs: Sequence[Job]) -> Answer:
        """Start the sequences of one request: jobs of equally many samples. Raises `ApiError` 429 when too many are
        open already.
        """
        in_use = sum(rank.open_count for rank in self._ranks)
        if in_use + sum(len(job.params) for job in jobs) > self.max_open:
            raise ApiError(
                429,
                f"{in_use} sequences are running or waiting, and at most {self.max_open} may be",
                code="overloaded",
                retry_after_seconds=1,
            )
        rank = min(self._ranks, key=lambda rank: rank.open_count)
        sink: Sink = asyncio.Queue()
        generations: list[Generation] = []
        for job in jobs:
            generations += self._start(rank, len(generations), job, sink)
        self._answers += 1
        self._no_answers.clear()

        def release(unread: Sequence[Generation]) -> None:
            rank.release(unread)
            self._answers -= 1
            if not self._answers:
                self._no_answers.set()

        return Answer(generations, len(jobs[0].params), sink, release)

    def _start(self, rank: Rank, index: int, job: Job, sink: Sink) -> list[Generation]:
        """The samples of one prompt; all share the blocks of the first one's prompt."""
        rank.metrics.prompt_tokens.inc(len(job.prompt))
        samples: list[Generation] = []
        for number, params in enumerate(job.params):
            generation = Generation(
                request_id=uuid.uuid4().hex,
                index=index + number,
                prompt_tokens=len(job.prompt),
                detokenizer=Detokenizer(job.tokens, job.stops, stops_after=params.min_tokens, continues=job.continues),
                shown_stop_ids=job.shown_stop_ids,
                sink=sink,
                metrics=rank.metrics,
                prompt_field=job.prompt_field,
                only_prompt=job.only_prompt,
            )
            message = Submit(
                request_id=generation.request_id,
                prompt_token_ids=() if samples else job.prompt,
                params=params,
                shares_prompt_with=samples[0].request_id if samples else None,
            )
            rank.submit(generation, message)
            samples.append(generation)
        return samples

    def fail_all(self, error: ApiError) -> None:
        """End every open sequence with an error."""
        for rank in self._ranks:
            rank.fail_all(error)

    async def wait_until_idle(self) -> None:
        await self._no_answers.wait()

"""The step loop of one rank: schedule, run, sample, commit. Owns the order of these four and who fails alone.

One thread drives it. The worker process and the in-process `LLM` both do; neither touches scheduler or blocks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import PromptScores, RequestRefused, Row, Scheduler, Step
from hpu_engine.step.batch import Batch, build_batch
from hpu_engine.step.padded_batch import PaddedBatch, build_padded_batch
from hpu_engine.step.sampler import Draw, Sampled, SamplingFailed, log_probabilities, sample
from hpu_engine.step.shapes import FirstSeen, ShapeMap, StepShapes
from hpu_engine.wire.messages import Heartbeat, Rejected, RowOutput, Submit, TokenLogprobs

PADDING = Draw(SamplingParams(temperature=0.0), seed=0, tokens=(), prompt_len=0)
"""How a padding row's token is chosen before it is dropped."""


class Runner(Protocol):
    """What turns a batch into logits: a model, its weights and its KV pool on a device."""

    @property
    def vocab(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def hidden(self, batch: Batch | PaddedBatch) -> Tensor:
        """Runs the batch: [tokens, hidden], or [rows of its buffer, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] of `hidden` to [rows, vocab] float32."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. `rejected` are requests whose own handling failed, `begun` those that had waited until now."""

    outputs: tuple[RowOutput, ...]
    rejected: tuple[Rejected, ...]
    seconds: float
    num_tokens: int
    begun: tuple[str, ...] = ()


class StepLoop:
    """With `shapes` of a set of buckets every step is padded to them."""

    def __init__(self, scheduler: Scheduler, runner: Runner, shapes: ShapeMap | None = None) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.shapes = shapes or ShapeMap(runner.block_size)
        self.first_seen = FirstSeen()
        self.steps = 0
        self.shape: str | None = None
        """The shapes that run now, or ran last."""

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(self, message: Submit) -> Rejected | None:
        """Queue a request; the refusal when it can never run."""
        params = message.params
        seed = secrets.randbits(63) if params.seed is None else params.seed
        try:
            self._check_token_ids(message.prompt_token_ids)
            prompt = list(message.prompt_token_ids)
            self._scheduler.add(Request(message.request_id, prompt, params, seed, message.shares_prompt_with))
        except RequestRefused as refusal:
            return Rejected(request_id=message.request_id, message=str(refusal), param=refusal.param)
        return None

    def abort(self, request_ids: Iterable[str]) -> None:
        self._scheduler.abort(request_ids)

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Run one step. With nothing to do it is a no-op with an empty result."""
        started = time.monotonic()
        step = self._scheduler.schedule()
        if not step.rows:
            return StepResult((), (), 0.0, 0)
        shapes = self.shapes.of(step)
        self.shape = str(shapes)
        self.first_seen.see(shapes.recipes())
        batch = self._batch(step, shapes)
        hidden = self._runner.hidden(batch)
        # A head over no rows would be a shape of its own.
        outputs = hidden[batch.output_rows]
        logits = self._runner.logits(outputs) if shapes.outputs.count else outputs.new_empty(0, self._runner.vocab)
        sampled = self._sample(step, logits)
        scores = self._score_prompts(step, shapes, [hidden[piece] for piece in batch.score_pieces])
        begun = tuple(row.request.request_id for row in step.rows if not row.request.has_run)
        rejected = _rejections(step, sampled, scores)
        # Before the commit, which passes over requests that are gone: nothing of a failed one is reported or cached.
        self._scheduler.abort(refusal.request_id for refusal in rejected)
        rows = self._scheduler.commit(
            step,
            [None if isinstance(token, SamplingFailed) else token for token in sampled],
            [() if isinstance(own, SamplingFailed) else own for own in scores],
        )
        self.steps += 1
        seconds = time.monotonic() - started
        return StepResult(tuple(rows), tuple(rejected), seconds, step.num_tokens, begun)

    def heartbeat(self) -> Heartbeat:
        """Where the loop stands now."""
        scheduler = self._scheduler
        return Heartbeat(
            steps=self.steps,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_blocks_used=scheduler.pool.num_used,
            kv_blocks_total=scheduler.pool.num_blocks,
            preemptions=scheduler.counters.preemptions,
            prefix_queries=scheduler.counters.prefix_queries,
            prefix_hits=scheduler.counters.prefix_hits,
            bucket=self.shape,
            first_seen_shapes=self.first_seen.after_warm_up,
        )

    def _batch(self, step: Step, shapes: StepShapes) -> Batch | PaddedBatch:
        if self.shapes.buckets is None:
            return build_batch(step, self._runner.block_size)
        return build_padded_batch(step, shapes, self.shapes.buckets.limits)

    def _sample(self, step: Step, logits: Tensor) -> list[Sampled | SamplingFailed | None]:
        """What each row of the step emits, or why it does not; `logits` [emitting rows, vocab], perhaps padded."""
        emitting = [row for row in step.rows if row.emits]
        drawn = iter(self._draw(emitting, logits) if emitting else [])
        return [next(drawn) if row.emits else None for row in step.rows]

    def _score_prompts(
        self, step: Step, shapes: StepShapes, pieces: Sequence[Tensor]
    ) -> list[PromptScores | SamplingFailed]:
        """Log-probabilities of prompt tokens, row by row; `pieces` [scored tokens, hidden] are in that order."""
        wanted = iter(
            (row.request.tokens[position + 1], row.request.params.prompt_logprobs or 0)
            for row in step.rows
            for position in range(row.score_from, row.score_from + row.scores)
        )
        scores = [
            _score(logits, *next(wanted))
            for fit, hidden in zip(shapes.scores, pieces, strict=True)
            for logits in self._runner.logits(hidden)[: fit.count]
        ]
        ends = list(accumulate(row.scores for row in step.rows))
        return [_whole(scores[end - row.scores : end]) for row, end in zip(step.rows, ends, strict=True)]

    def _draw(self, rows: list[Row], logits: Tensor) -> list[Sampled | SamplingFailed]:
        requests = [row.request for row in rows]
        draws = [Draw(one.params, one.seed, one.tokens, one.prompt_len, one.counts) for one in requests]
        try:
            return sample(logits, draws + [PADDING] * (logits.shape[0] - len(draws)))[: len(draws)]
        except Exception:  # one row's trouble must not end the others
            return [self._draw_alone(logits[index : index + 1], draw) for index, draw in enumerate(draws)]

    def _draw_alone(self, logits: Tensor, draw: Draw) -> Sampled | SamplingFailed:
        try:
            return sample(logits, [draw])[0]
        except Exception as error:  # see above: this row is the one
            return _failure(error)

    def _check_token_ids(self, token_ids: tuple[int, ...]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._runner.vocab:
            wrong = next(token for token in token_ids if not 0 <= token < self._runner.vocab)
            raise RequestRefused(f"token id {wrong} is outside of the vocabulary of {self._runner.vocab}")


def _score(logits: Tensor, token: int, count: int) -> TokenLogprobs | SamplingFailed:
    try:
        return log_probabilities(logits, token, count)
    except Exception as error:  # one row's trouble must not end the others
        return _failure(error)


def _whole(scores: Sequence[TokenLogprobs | SamplingFailed]) -> PromptScores | SamplingFailed:
    """One request's: all of them, or why one of them is missing."""
    whole: list[TokenLogprobs] = []
    for score in scores:
        if isinstance(score, SamplingFailed):
            return score
        whole.append(score)
    return tuple(whole)


def _failure(error: Exception) -> SamplingFailed:
    return error if isinstance(error, SamplingFailed) else SamplingFailed(repr(error))


def _rejections(
    step: Step, sampled: Sequence[Sampled | SamplingFailed | None], scores: Sequence[PromptScores | SamplingFailed]
) -> list[Rejected]:
    """The requests that could not be given a token, or the scores of their prompt."""
    rejected = []
    for row, token, own in zip(step.rows, sampled, scores, strict=True):
        if isinstance(own, SamplingFailed):
            message = f"the request's prompt could not be scored: {own}"
        elif isinstance(token, SamplingFailed):
            message = f"the request's token could not be sampled: {token}"
        else:
            continue
        rejected.append(Rejected(request_id=row.request.request_id, message=message, internal=True))
    return rejected

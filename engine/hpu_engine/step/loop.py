"""The step loop of one rank: schedule, agree, run, sample, commit. Owns the order of these and who fails alone.

One thread drives it. The worker process and the in-process `LLM` both do; neither touches scheduler or blocks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import PromptScores, RequestRefused, Row, Scheduler, Step
from hpu_engine.step.input import StepInput, input_of
from hpu_engine.step.sampler import Draw, Sampled, SamplingFailed, log_probabilities, sample
from hpu_engine.step.shapes import FirstSeen, ShapeMap, StepShapes
from hpu_engine.wire.messages import Heartbeat, Rejected, RowOutput, Submit, TokenLogprobs

PADDING = Draw(SamplingParams(temperature=0.0), seed=0, tokens=(), prompt_len=0)
"""Sampling settings of padding rows; their tokens are dropped."""

Agree = Callable[[StepShapes], StepShapes]
"""From the shapes that this rank's step needs to those that all ranks of the group run now; empty where none has work.
A rank without work of its own then runs padding alone.
"""

TakeScores = Callable[[Tensor, int], None]
"""Takes logits [tokens, vocab] float32 of scored prompt tokens, and how many of these rows are no padding."""


def alone(shapes: StepShapes) -> StepShapes:
    """The agreement of a rank that computes with no other."""
    return shapes


class Runner(Protocol):
    """What turns the input of a step into logits: a model, its weights and its KV pool on a device."""

    shapes: ShapeMap
    first_seen: FirstSeen
    shape: str | None

    @property
    def vocab(self) -> int: ...

    def run(self, step: StepInput, shapes: StepShapes, take_scores: TakeScores) -> Tensor:
        """Logits [outputs, vocab] float32 of the emitting rows, then of padding; those of scored prompt tokens go to
        `take_scores`, some at a time, in the order of the rows.
        """
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
    """`agree` is asked before each step."""

    def __init__(self, scheduler: Scheduler, runner: Runner, agree: Agree = alone) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._agree = agree
        self.steps = 0

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

    @property
    def shape(self) -> str | None:
        """The shapes that run now, or ran last."""
        return self._runner.shape

    def abort(self, request_ids: Iterable[str]) -> None:
        self._scheduler.abort(request_ids)

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Run one step. Where neither this rank nor another has work it is a no-op with an empty result."""
        started = time.monotonic()
        step = self._scheduler.schedule()
        given = input_of(step.rows, self._runner.shapes.block_size)
        shapes = self._agree(self._runner.shapes.of(given))
        if shapes.is_empty:
            return StepResult((), (), 0.0, 0)
        scoring = _Scoring(step)
        logits = self._runner.run(given, shapes, scoring.take)
        sampled = self._sample(step, logits)
        return self._commit(step, sampled, scoring.by_row(), started)

    def _commit(
        self,
        step: Step,
        sampled: Sequence[Sampled | SamplingFailed | None],
        scores: Sequence[PromptScores | SamplingFailed],
        started: float,
    ) -> StepResult:
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
            bucket=self._runner.shape,
            first_seen_shapes=self._runner.first_seen.after_warm_up,
        )

    def _sample(self, step: Step, logits: Tensor) -> list[Sampled | SamplingFailed | None]:
        """What each row of the step emits, or why it does not; `logits` [emitting rows, vocab], perhaps padded."""
        emitting = [row for row in step.rows if row.emits]
        drawn = iter(self._draw(emitting, logits) if emitting else [])
        return [next(drawn) if row.emits else None for row in step.rows]

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


class _Scoring:
    """Log-probabilities of the prompt tokens that a step scores, row by row, taken while their logits are at hand."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._wanted = self._tokens()
        self._scores: list[TokenLogprobs | SamplingFailed] = []

    def _tokens(self) -> Iterator[tuple[int, int]]:
        """The token whose score is wanted, and how many of the most likely beside it."""
        for row in self._step.rows:
            for position in range(row.score_from, row.score_from + row.scores):
                yield row.request.tokens[position + 1], row.request.params.prompt_logprobs or 0

    def take(self, logits: Tensor, count: int) -> None:
        """`logits` [tokens, vocab] of the next `count` scored tokens, then of padding."""
        self._scores.extend(_score(row, *next(self._wanted)) for row in logits[:count])

    def by_row(self) -> list[PromptScores | SamplingFailed]:
        rows = self._step.rows
        ends = accumulate(row.scores for row in rows)
        return [_whole(self._scores[end - row.scores : end]) for row, end in zip(rows, ends, strict=True)]


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

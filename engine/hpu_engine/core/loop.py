"""The step loop of one rank: schedule, run, sample, commit. Owns the order of these four and who fails alone.

One thread drives it. The worker process and the in-process `LLM` both do; neither touches scheduler or blocks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from hpu_engine.core.batch import Batch, build_batch
from hpu_engine.core.messages import Heartbeat, Rejected, RowOutput, Submit
from hpu_engine.core.request import Request
from hpu_engine.core.sampler import Draw, Sampled, SamplingFailed, log_probabilities, sample
from hpu_engine.core.scheduler import PromptScores, RequestRefused, Row, Scheduler, Step

SCORED_AT_ONCE = 64


class Runner(Protocol):
    """What turns a batch into logits: a model, its weights and its KV pool on a device."""

    @property
    def vocab(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def hidden(self, batch: Batch) -> Tensor:
        """Runs the batch: [tokens, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] of `hidden` to [rows, vocab] float32."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. `rejected` are requests whose own handling failed."""

    outputs: tuple[RowOutput, ...]
    rejected: tuple[Rejected, ...]
    seconds: float
    num_tokens: int


class StepLoop:
    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.steps = 0
        self.shape: str | None = None
        """The shape that runs now, or ran last."""

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
        batch = build_batch(step, self._runner.block_size)
        self.shape = shape_name(batch)
        hidden = self._runner.hidden(batch)
        sampled, rejected = self._sample(step, self._runner.logits(hidden[batch.output_rows]))
        outputs = self._scheduler.commit(step, sampled, self._score_prompts(step, hidden[batch.score_rows]))
        self._scheduler.abort(refusal.request_id for refusal in rejected)
        self.steps += 1
        seconds = time.monotonic() - started
        return StepResult(tuple(outputs), tuple(rejected), seconds, step.num_tokens)

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
        )

    def _sample(self, step: Step, logits: Tensor) -> tuple[list[Sampled | None], list[Rejected]]:
        """Tokens in the order of the step's rows, and the requests that could not be given one."""
        emitting = [row for row in step.rows if row.emits]
        drawn = iter(self._draw(emitting, logits) if emitting else [])
        sampled: list[Sampled | None] = []
        rejected: list[Rejected] = []
        for row in step.rows:
            token = next(drawn) if row.emits else None
            if isinstance(token, SamplingFailed):
                sampled.append(None)
                message = f"the request's token could not be sampled: {token}"
                rejected.append(Rejected(request_id=row.request.request_id, message=message, internal=True))
            else:
                sampled.append(token)
        return sampled, rejected

    def _score_prompts(self, step: Step, hidden: Tensor) -> list[PromptScores]:
        """Log-probabilities of prompt tokens, row by row; `hidden` [scored tokens, hidden] in that order."""
        wanted = [
            (row.request.tokens[position + 1], row.request.params.prompt_logprobs or 0)
            for row in step.rows
            for position in range(row.score_from, row.score_from + row.scores)
        ]
        # A few rows at a time: logits of a whole chunk would take more memory than anything else in a step.
        scores = [
            log_probabilities(logits, *one)
            for start in range(0, len(wanted), SCORED_AT_ONCE)
            for logits, one in zip(
                self._runner.logits(hidden[start : start + SCORED_AT_ONCE]),
                wanted[start : start + SCORED_AT_ONCE],
                strict=True,
            )
        ]
        ends = list(accumulate(row.scores for row in step.rows))
        return [tuple(scores[end - row.scores : end]) for row, end in zip(step.rows, ends, strict=True)]

    def _draw(self, rows: list[Row], logits: Tensor) -> list[Sampled | SamplingFailed]:
        draws = [Draw(row.request.params, row.request.seed, row.request.tokens, row.request.prompt_len) for row in rows]
        try:
            return list(sample(logits, draws))
        except Exception:  # one row's trouble must not end the others
            return [self._draw_alone(logits[index : index + 1], draw) for index, draw in enumerate(draws)]

    def _draw_alone(self, logits: Tensor, draw: Draw) -> Sampled | SamplingFailed:
        try:
            return sample(logits, [draw])[0]
        except Exception as error:  # see above: this row is the one
            return error if isinstance(error, SamplingFailed) else SamplingFailed(repr(error))

    def _check_token_ids(self, token_ids: tuple[int, ...]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._runner.vocab:
            wrong = next(token for token in token_ids if not 0 <= token < self._runner.vocab)
            raise RequestRefused(f"token id {wrong} is outside of the vocabulary of {self._runner.vocab}")


def shape_name(batch: Batch) -> str:
    """The shape of a step in words, for heartbeats and termination messages."""
    width = batch.single_blocks.shape[1]
    return f"tokens={batch.num_tokens} chunks={len(batch.chunks)} singles={batch.num_singles} blocks={width}"

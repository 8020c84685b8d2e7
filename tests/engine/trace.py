"""Random traces on a rank, with the logits of every emitted token kept: the differential fuzzer of the exact mode."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hpu_engine.planning.shapes.limits import StepLimits
from hpu_engine.scheduling.kv_blocks import BlockPool
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Limits, Scheduler, Step
from hpu_engine.step.loop import StepLoop
from hpu_engine.step.sampler import Sampled, SamplingFailed
from hpu_engine.step.shapes import FirstSeen, ShapeMap
from hpu_engine.wire.messages import Submit, TokenLogprobs
from hpu_engine.worker.start_up import Rank


class RecordingLoop(StepLoop):
    """Keeps the logits that each token was sampled from."""

    def __init__(self, scheduler: Scheduler, rank: Rank, shapes: ShapeMap) -> None:
        self.runner = replace(rank.runner, shapes=shapes, first_seen=FirstSeen())
        super().__init__(scheduler, self.runner)
        self.logits: dict[tuple[str, int], Tensor] = {}

    def _sample(self, step: Step, logits: Tensor) -> list[Sampled | SamplingFailed | None]:
        emitting = [row for row in step.rows if row.emits]
        for row, own in zip(emitting, logits[: len(emitting)], strict=True):
            self.logits[row.request.request_id, row.request.num_output] = own.clone()
        return super()._sample(step, logits)


@dataclass(frozen=True)
class Asked:
    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrives_at_step: int = 0
    aborted_at_step: int | None = None
    shares_prompt_with: str | None = None


@dataclass(frozen=True)
class Schedule:
    """How a rank shares its steps. Everything here must leave the tokens as they are.

    `force_buckets`: every step is padded to the buckets that are planned for these limits.
    """

    budget: int
    num_blocks: int
    max_num_seqs: int = 8
    prefix_cache: bool = True
    force_buckets: bool = False


@dataclass
class Answers:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    preemptions: int = 0
    prefix_hits: int = 0
    first_seen_shapes: int = 0


def replay(
    rank: Rank, asked: Sequence[Asked], schedule: Schedule, warm_up: Callable[[RecordingLoop], None] | None = None
) -> Answers:
    limits = Limits(schedule.budget, schedule.max_num_seqs, rank.loaded.max_model_len)
    pool = BlockPool(schedule.num_blocks, rank.loaded.block_size, prefix_cache=schedule.prefix_cache)
    names = [one.name for one in asked]
    answers = Answers({name: [] for name in names}, {}, {name: [] for name in names}, {name: [] for name in names})
    shapes = shape_map(rank, limits, pool) if schedule.force_buckets else ShapeMap(pool.block_size)
    loop = RecordingLoop(Scheduler(limits, pool), rank, shapes)
    if warm_up is not None:
        warm_up(loop)
    loop.runner.first_seen.end_warm_up()
    waiting = sorted(asked, key=lambda one: one.arrives_at_step)
    number = 0
    while waiting or loop.has_work:
        while waiting and waiting[0].arrives_at_step <= number:
            one = waiting.pop(0)
            refused = loop.submit(
                Submit(
                    request_id=one.name,
                    prompt_token_ids=one.prompt,
                    params=one.params,
                    shares_prompt_with=one.shares_prompt_with,
                )
            )
            assert refused is None, refused
        loop.abort([one.name for one in asked if one.aborted_at_step == number])
        result = loop.step()
        assert not result.rejected
        for row in result.outputs:
            answers.tokens[row.request_id].extend(row.token_ids)
            answers.logprobs[row.request_id].extend(row.logprobs or ())
            answers.prompt_logprobs[row.request_id].extend(row.prompt_logprobs or ())
        loop.scheduler.check_integrity()
        number += 1
    assert pool.num_used == 0
    answers.logits = loop.logits
    answers.preemptions = loop.scheduler.counters.preemptions
    answers.prefix_hits = loop.scheduler.counters.prefix_hits
    answers.first_seen_shapes = loop.runner.first_seen.after_warm_up
    return answers


def shape_map(rank: Rank, limits: Limits, pool: BlockPool) -> ShapeMap:
    """The buckets of these limits, whatever the rank was opened with."""
    size, blocks = pool.block_size, pool.num_blocks
    longest = min(limits.max_model_len, blocks * size)
    step = StepLimits(longest, limits.max_num_seqs, limits.max_batched_tokens, size, blocks)
    return ShapeMap(size, rank.settled.buckets_for(step))


def one_at_a_time(rank: Rank, asked: Sequence[Asked], num_blocks: int) -> Answers:
    """Each request alone, its prompt in one chunk, nothing cached: what every schedule is held against."""
    answers = Answers()
    for one in asked:
        alone = replace(one, arrives_at_step=0, aborted_at_step=None, shares_prompt_with=None)
        own = replay(rank, [alone], Schedule(len(one.prompt) + 1, num_blocks, prefix_cache=False))
        answers.tokens.update(own.tokens)
        answers.logprobs.update(own.logprobs)
        answers.prompt_logprobs.update(own.prompt_logprobs)
        answers.logits.update(own.logits)
    return answers


def first_difference(expected: Answers, found: Answers) -> str | None:
    """The first token or logit that differs, in words; tokens of an aborted request may be missing at the end."""
    for (name, number), own in sorted(found.logits.items(), key=lambda item: item[0]):
        reference = expected.logits[name, number]
        if not torch.equal(own, reference):
            off = (own - reference).abs()
            return (
                f"token {number} of {name}: {int((off > 0).sum())} of {off.numel()} logits differ, by {off.max():.3g}"
            )
    for name, tokens in found.tokens.items():
        if tokens != expected.tokens[name][: len(tokens)]:
            return f"tokens of {name}: {tokens} instead of {expected.tokens[name]}"
        for what in ("logprobs", "prompt_logprobs"):
            wanted, got = getattr(expected, what)[name], getattr(found, what)[name]
            for number, (left, right) in enumerate(zip(wanted, got, strict=False)):
                if left != right:
                    return f"{what} of {name}, number {number}: {right} instead of {left}"
    return None


def random_trace(seed: int, vocab: int, block_size: int, count: int = 6) -> list[Asked]:
    """Prompts that share prefixes, lengths around multiples of the block size, seeded and greedy rows, penalties,
    log-probabilities, several samples of one prompt, some aborts.
    """
    chance = random.Random(seed)
    stem = [chance.randrange(vocab) for _ in range(3 * block_size)]
    asked: list[Asked] = []
    for number in range(count):
        around = block_size * chance.randint(0, 3) + chance.randint(-2, 2)
        length = max(1, around if chance.random() < 0.6 else chance.randint(1, 4 * block_size))
        shared = min(length, chance.choice([0, len(stem), len(stem), block_size]))
        prompt = stem[:shared] + [chance.randrange(vocab) for _ in range(length - shared)]
        sibling = asked[-1] if asked and chance.random() < 0.2 else None
        params = SamplingParams(
            max_tokens=chance.randint(1, 2 * block_size),
            temperature=chance.choice([0.0, 1.0, 1.0]),
            top_p=chance.choice([1.0, 0.9]),
            top_k=chance.choice([0, 40]),
            seed=chance.getrandbits(40),
            logprobs=chance.choice([None, None, 0, 3]),
            prompt_logprobs=chance.choice([None, None, None, 2]),
            repetition_penalty=chance.choice([1.0, 1.0, 1.2]),
            frequency_penalty=chance.choice([0.0, 0.0, 0.5]),
        )
        arrives = chance.randint(0, 12)
        aborted = arrives + chance.randint(1, 12) if chance.random() < 0.15 else None
        if sibling is not None:
            prompt, arrives = list(sibling.prompt), sibling.arrives_at_step
            aborted = aborted and arrives + 1 + aborted % 12
        shares = sibling.name if sibling else None
        asked.append(Asked(f"r{number}", tuple(prompt), params, arrives, aborted, shares))
    return asked

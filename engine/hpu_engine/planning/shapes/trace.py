"""From request lengths to the shapes of steps: a scheduler in miniature, and the trace assumed where none is given.

The miniature keeps what decides shapes and nothing else: one token for every running request first, then prompts in
order of arrival within what is left of the budget, chunks cut at a block boundary unless they end the prompt, a
request admitted only when its blocks are free. Nothing is known of the load, so every order of magnitude of
concurrency gets the same time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from hpu_engine.planning.shapes.choice import Histogram
from hpu_engine.planning.shapes.limits import Kind, Size, StepLimits, StepShape

STEP_LIMIT = 12_000
"""Steps that one histogram is made from."""

UNSEEN_OBSERVED, UNSEEN_FITTED, UNSEEN_ASSUMED = 0.01, 0.1, 0.3
"""How little each kind of histogram is trusted (`Histogram.unseen`): steps as they were, lengths served at a load that
is a guess, and a guess altogether."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request: tokens of its prompt and of its answer."""

    prompt: int
    output: int


def assumed_lengths(limits: StepLimits, count: int = 400) -> tuple[Lengths, ...]:
    """Requests for a configuration that comes with no trace: every order of magnitude of length equally likely.

    Prompts and answers are spread evenly in logarithm over what the model length allows, by a low-discrepancy
    sequence, so the same configuration always gives the same requests.
    """
    most = max(1, limits.max_model_len - 1)
    requests = []
    for index in range(1, count + 1):
        prompt = max(1, round(math.pow(most, _spread(index, 2))))
        room = max(1, limits.max_model_len - prompt)
        requests.append(Lengths(prompt, max(1, round(math.pow(room, _spread(index, 3))))))
    return tuple(requests)


def rising_load(limits: StepLimits, steps: int = STEP_LIMIT) -> Callable[[int], int]:
    """Concurrency that rises from one to all sequences, evenly in logarithm, within `steps` steps."""
    most = limits.decode_rows
    return lambda step: max(1, round(math.pow(most, min(1.0, step / steps))))


def simulate(
    requests: Iterable[Lengths], limits: StepLimits, load: Callable[[int], int], *, steps: int = STEP_LIMIT
) -> Iterator[StepShape]:
    """The first `steps` steps that serve `requests` in order, with at most `load(step)` of them at a time."""
    rank = _Rank(limits, _fitting(requests, limits), load)
    for _ in range(steps):
        step = rank.step()
        if step is None:
            return
        yield step


def observed_histogram(steps: Iterable[StepShape]) -> Histogram:
    """Calls of each shape per step, from steps that a scheduler made."""
    return Histogram(_count(steps), unseen=UNSEEN_OBSERVED)


def fitted_histogram(requests: Sequence[Lengths], limits: StepLimits) -> Histogram:
    """What steps look like when `requests` are served over and over at every load. Raises ValueError if none fits."""
    fitting = list(_fitting(requests, limits))
    if not fitting:
        raise ValueError(f"no request of the trace has a prompt below the model length {limits.max_model_len}")
    return Histogram(_count(simulate(cycle(fitting), limits, rising_load(limits))), unseen=UNSEEN_FITTED)


def assumed_histogram(limits: StepLimits) -> Histogram:
    """What steps look like as far as a configuration alone tells."""
    steps = simulate(cycle(assumed_lengths(limits)), limits, rising_load(limits))
    return Histogram(_count(steps), unseen=UNSEEN_ASSUMED)


def _count(steps: Iterable[StepShape]) -> dict[Kind, dict[Size, float]]:
    counts: dict[Kind, Counter[Size]] = {kind: Counter() for kind in Kind}
    total = 0
    for step in steps:
        total += 1
        for kind, size in step.parts():
            counts[kind][size] += 1
    return {kind: {size: count / total for size, count in counter.items()} for kind, counter in counts.items()}


@dataclass(slots=True)
class _Prompt:
    request: Lengths
    reserved: int
    computed: int = 0


class _Rank:
    """One rank's requests. A decode step costs the same however many rows it has: rows are kept as counts, by the step
    at which they finish and by the step at which they next begin a block."""

    def __init__(self, limits: StepLimits, requests: Iterable[Lengths], load: Callable[[int], int]) -> None:
        self._limits = limits
        self._waiting = iter(requests)
        self._next = next(self._waiting, None)
        self._load = load
        self._admitted = 0
        self._free = limits.kv_blocks or limits.decode_rows * limits.blocks_per_row
        self._prompts: deque[_Prompt] = deque()
        self._rows = self._blocks = self._now = 0
        self._finishing: dict[int, list[tuple[int, int, int]]] = {}
        self._starting_block = [0] * limits.block_size

    def step(self) -> StepShape | None:
        """Advance by one step; None once everything is served."""
        self._admit()
        if not self._rows and not self._prompts:
            return None
        size = self._limits.block_size
        self._blocks += self._starting_block[self._now % size]
        rows, blocks = self._rows, self._blocks
        prefill, finished = self._prefill(self._limits.max_batched_tokens - rows)
        for held, phase, reserved in self._finishing.pop(self._now, ()):
            self._rows -= 1
            self._blocks -= held
            self._starting_block[phase] -= 1
            self._release(reserved)
        self._now += 1
        for prompt in finished:
            self._begin_decode(prompt)
        return StepShape(prefill, rows, blocks, rows + len(finished))

    def _admit(self) -> None:
        size = self._limits.block_size
        most = self._load(self._now)
        while self._next is not None and self._admitted < most:
            request = self._next
            blocks = -(-(request.prompt + request.output) // size)
            if blocks > self._free:
                return
            self._next = next(self._waiting, None)
            self._free -= blocks
            self._admitted += 1
            self._prompts.append(_Prompt(request, blocks))

    def _release(self, blocks: int) -> None:
        self._free += blocks
        self._admitted -= 1

    def _prefill(self, budget: int) -> tuple[tuple[Size, ...], list[_Prompt]]:
        size = self._limits.block_size
        rows: list[Size] = []
        finished = []
        while self._prompts and budget > 0:
            prompt = self._prompts[0]
            remaining = prompt.request.prompt - prompt.computed
            chunk = min(remaining, budget)
            if size < chunk < remaining:
                chunk -= chunk % size
            rows.append((chunk, -(-prompt.computed // size)))
            prompt.computed += chunk
            if chunk < remaining:
                break
            budget -= chunk
            finished.append(self._prompts.popleft())
        return tuple(rows), finished

    def _begin_decode(self, prompt: _Prompt) -> None:
        """The prompt's step gave the first token; each of the others takes one step, in which it is written."""
        size = self._limits.block_size
        context, steps = prompt.request.prompt, prompt.request.output - 1
        if steps == 0:
            self._release(prompt.reserved)
            return
        # A step that finds `context` a multiple of the block size begins a block.
        phase = (self._now - context) % size
        self._rows += 1
        self._blocks += -(-context // size)
        self._starting_block[phase] += 1
        held = -(-(context + steps) // size)
        self._finishing.setdefault(self._now + steps - 1, []).append((held, phase, prompt.reserved))


def _fitting(requests: Iterable[Lengths], limits: StepLimits) -> Iterator[Lengths]:
    """Requests as the engine would admit them: prompts beyond the model length are refused, answers capped."""
    most = limits.max_model_len
    if limits.kv_blocks is not None:
        most = min(most, limits.kv_blocks * limits.block_size)
    for request in requests:
        if 0 < request.prompt < most:
            yield Lengths(request.prompt, max(1, min(request.output, most - request.prompt)))


def _spread(index: int, base: int) -> float:
    """The `index`th number of the van der Corput sequence in `base`, in (0, 1)."""
    value, fraction = 0.0, 1.0 / base
    while index:
        index, digit = divmod(index, base)
        value += digit * fraction
        fraction /= base
    return value

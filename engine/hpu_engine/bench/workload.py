"""What is sent and when: three fixed workloads. Pure; prompts are drawn from the generator that is passed in.

`a`: 32 requests at once, 128 tokens in, 128 out: a loaded server. `single`: requests of that size one after another:
one user. `b`: 24 requests of 128 in and 96 out at once, and six of 2048 in and 32 out from second 1 on, every 1.5 s:
what long prompts do to the others. Prompts are token ids, so lengths are exact and no server has them cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class WorkloadName(StrEnum):
    A = "a"
    SINGLE = "single"
    B = "b"


@dataclass(frozen=True, slots=True)
class Request:
    """`start_seconds` counts from the start of the workload; `kind` groups requests whose figures belong together."""

    kind: str
    start_seconds: float
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """`concurrency` is how many requests may be open at once; the next one waits for a free place."""

    name: str
    requests: tuple[Request, ...]
    concurrency: int


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Prompts are drawn from `low` to `high`, both included; every id must be in the server's vocabulary."""

    low: int
    high: int

    def prompt(self, rng: random.Random, length: int) -> tuple[int, ...]:
        return tuple(rng.randint(self.low, self.high) for _ in range(length))


def build(name: WorkloadName, ids: TokenIds, rng: random.Random) -> Workload:
    """A new instance of the workload: same sizes and times, other prompts."""
    return _BUILDERS[name](ids, rng)


def _a(ids: TokenIds, rng: random.Random) -> Workload:
    return Workload("a", tuple(Request("all", 0.0, ids.prompt(rng, 128), 128) for _ in range(32)), concurrency=32)


def _single(ids: TokenIds, rng: random.Random) -> Workload:
    return Workload("single", tuple(Request("all", 0.0, ids.prompt(rng, 128), 128) for _ in range(3)), concurrency=1)


def _b(ids: TokenIds, rng: random.Random) -> Workload:
    short = tuple(Request("short", 0.0, ids.prompt(rng, 128), 96) for _ in range(24))
    long = tuple(Request("long", 1.0 + 1.5 * index, ids.prompt(rng, 2048), 32) for index in range(6))
    return Workload("b", short + long, concurrency=30)


_BUILDERS: dict[WorkloadName, Callable[[TokenIds, random.Random], Workload]] = {
    WorkloadName.A: _a,
    WorkloadName.SINGLE: _single,
    WorkloadName.B: _b,
}

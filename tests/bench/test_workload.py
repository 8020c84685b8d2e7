"""The three workloads have the sizes and times their names stand for, and never the same prompt twice."""

from __future__ import annotations

import random
from collections import Counter

from hpu_engine.bench.workload import TokenIds, WorkloadName, build

IDS = TokenIds(1000, 20000)


def test_sizes_and_times() -> None:
    a, single, b = (build(name, IDS, random.Random(0)) for name in WorkloadName)
    assert Counter((len(r.prompt), r.max_tokens, r.start_seconds) for r in a.requests) == {(128, 128, 0.0): 32}
    assert a.concurrency == 32
    assert {(len(r.prompt), r.max_tokens) for r in single.requests} == {(128, 128)}
    assert single.concurrency == 1
    assert Counter((r.kind, len(r.prompt), r.max_tokens) for r in b.requests) == {
        ("short", 128, 96): 24,
        ("long", 2048, 32): 6,
    }
    assert [r.start_seconds for r in b.requests if r.kind == "long"] == [1.0, 2.5, 4.0, 5.5, 7.0, 8.5]


def test_prompts_are_new_in_each_request_and_run_and_inside_the_range() -> None:
    rng = random.Random(0)
    prompts = [r.prompt for _ in range(2) for r in build(WorkloadName.A, IDS, rng).requests]
    assert len(set(prompts)) == 64
    assert 1000 <= min(map(min, prompts)) < max(map(max, prompts)) <= 20000

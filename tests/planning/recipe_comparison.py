"""Recipes and padding of our bucket sets against vllm-gaudi's three generators.

`python -m tests.planning.recipe_comparison` prints the table. Both run the same steps: one scheduler, the same
requests, a load that wanders at random between one request and all that fit. The fitted set has seen the steps of the
other half of the trace under another walk of the load, nothing of the judged half. vllm-gaudi runs a step as one
forward for each prompt row and one for all decode rows; we run it as one flat part, attention for each prompt row,
attention for the decode rows, and the sampler. Padding is work beyond what the step's exact shapes need, over that
work; work is weighed by one cost model (ERNIE-4.5-21B on a Gaudi 2) for both. Sampler recipes are counted for us, in
both variants, and not for vllm-gaudi.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle

from hpu_engine.planning.cards import CARDS
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.shapes.buckets import BucketSet, plan_buckets
from hpu_engine.planning.shapes.limits import Kind, StepLimits, StepShape
from hpu_engine.planning.shapes.step_cost import StepCost, step_cost
from hpu_engine.planning.shapes.trace import Lengths, assumed_histogram, observed_histogram, simulate
from tests.planning.facts import ERNIE_21B, published
from tests.planning.traces import TRACES, halves
from tests.planning.vllm_gaudi import GENERATORS, Lookup, Settings

STEPS = 12_000

CONFIGURATIONS = {
    "sharegpt": (StepLimits(4096, 128, 2048, 128, 3100), StepLimits(8192, 64, 8192, 128, 3100)),
    "chat": (StepLimits(4096, 128, 2048, 128, 3100), StepLimits(16384, 256, 4096, 128, 6000)),
    "long-prompts": (StepLimits(32768, 64, 8192, 128, 6000), StepLimits(16384, 32, 2048, 128, 3100)),
}


@dataclass(frozen=True)
class Result:
    """`padding` over all steps together (by time), `mean_step_padding` with every step counted alike."""

    recipes: int
    padding: float
    mean_step_padding: float
    misses: int = 0


@dataclass(frozen=True)
class Comparison:
    trace: str
    limits: StepLimits
    generator: str
    theirs: Result
    configured: Result
    fitted: Result


def reference_cost(block_size: int) -> StepCost:
    return step_cost(
        published(ERNIE_21B),
        Layout(),
        CARDS["gaudi2"],
        weight_format="bfloat16",
        kv_format="bfloat16",
        block_size=block_size,
    )


def wandering_load(limits: StepLimits, seed: int) -> Callable[[int], int]:
    """Concurrency as a random walk in logarithm: unlike the levels that a set is chosen with, and with no grid."""
    draw = random.Random(seed)
    levels = []
    level = 0.5
    for _ in range(STEPS // 20 + 1):
        level = min(1.0, max(0.0, level + draw.gauss(0, 0.12)))
        levels.append(max(1, round(limits.decode_rows**level)))
    return lambda step: levels[step // 20]


def exact_work(cost: StepCost, step: StepShape) -> float:
    return sum(cost.work_seconds(kind, size) for kind, size in step.parts())


def judge(steps: Iterable[StepShape], cost: StepCost, padded: Callable[[StepShape], float], recipes: int) -> Result:
    real = wanted = ratios = 0.0
    count = 0
    for step in steps:
        exact, used = exact_work(cost, step), padded(step)
        real += exact
        wanted += used
        ratios += used / exact - 1
        count += 1
    return Result(recipes, wanted / real - 1, ratios / count)


def judge_ours(steps: Iterable[StepShape], cost: StepCost, buckets: BucketSet) -> Result:
    def padded(step: StepShape) -> float:
        return sum(cost.work_seconds(bucket.kind, bucket.size) for bucket in buckets.step(step))

    return judge(steps, cost, padded, buckets.recipes)


def judge_theirs(steps: Iterable[StepShape], cost: StepCost, limits: StepLimits, generator: str) -> Result:
    assert limits.kv_blocks is not None
    settings = Settings(
        limits.max_model_len,
        limits.max_num_seqs,
        limits.max_batched_tokens,
        limits.block_size,
        limits.kv_blocks,
    )
    buckets = GENERATORS[generator](settings)
    lookup = Lookup(settings, buckets)

    def padded(step: StepShape) -> float:
        work = 0.0
        for new, context in step.prefill:
            _, query, blocks = lookup.find((1, new, context), prompt=True)
            work += cost.work_seconds(Kind.FLAT, (query, 0)) + cost.work_seconds(Kind.PREFILL, (query, blocks))
            work += cost.work_seconds(Kind.SAMPLER, (1, 0))
        if step.decode_rows:
            rows, _, blocks = lookup.find((step.decode_rows, 1, step.decode_blocks), prompt=False)
            work += cost.work_seconds(Kind.FLAT, (rows, 0)) + cost.work_seconds(Kind.DECODE, (rows, blocks))
            work += cost.work_seconds(Kind.SAMPLER, (rows, 0))
        return work

    result = judge(steps, cost, padded, len(buckets))
    return Result(result.recipes, result.padding, result.mean_step_padding, lookup.misses)


def compare(
    trace: str, requests: list[Lengths], limits: StepLimits, generators: Iterable[str] = tuple(GENERATORS)
) -> list[Comparison]:
    """One comparison for each generator: ours from the configuration alone, and fitted to the other half."""
    cost = reference_cost(limits.block_size)
    fit_half, judged_half = halves(requests)
    steps = list(simulate(cycle(judged_half), limits, wandering_load(limits, seed=11), steps=STEPS))
    assumed = assumed_histogram(limits)
    seen = observed_histogram(simulate(cycle(fit_half), limits, wandering_load(limits, seed=12), steps=STEPS))
    results = []
    for generator in generators:
        theirs = judge_theirs(steps, cost, limits, generator)
        configured = plan_buckets(limits, cost, assumed, recipes=theirs.recipes // 2)
        fitted = plan_buckets(limits, cost, seen, recipes=theirs.recipes // 4)
        results.append(
            Comparison(
                trace, limits, generator, theirs, judge_ours(steps, cost, configured), judge_ours(steps, cost, fitted)
            )
        )
    return results


def main() -> None:
    print(
        f"{'trace':13} {'len':>6} {'seqs':>4} {'budget':>6} {'generator':14} "
        "| theirs: recipes pad% step% miss | configured: recipes pad% step% | fitted: recipes pad% step%"
    )
    for trace, load in TRACES.items():
        requests = load()
        for limits in CONFIGURATIONS[trace]:
            for c in compare(trace, requests, limits):
                cells = " | ".join(
                    f"{r.recipes:6} {r.padding:7.1%} {r.mean_step_padding:7.1%}"
                    for r in (c.theirs, c.configured, c.fitted)
                )
                print(
                    f"{trace:13} {limits.max_model_len:6} {limits.max_num_seqs:4} {limits.max_batched_tokens:6} "
                    f"{c.generator:14} | {cells} | misses {c.theirs.misses}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""At equal or lower padding: half of vllm-gaudi's recipes from the configuration alone, a quarter when fitted.

The linear generator makes up to 16,666 buckets; it is compared in `python -m tests.planning.recipe_comparison`, which
prints all figures.
"""

from __future__ import annotations

import pytest

from hpu_engine.planning.shapes.limits import StepLimits
from tests.planning.recipe_comparison import CONFIGURATIONS, Comparison, compare
from tests.planning.traces import TRACES, halves

GENERATORS = ("exponential", "padding-aware")

NOT_REACHED = {("sharegpt", 8192, "exponential")}
"""76 recipes of theirs, so 38 and 19 of ours, for a budget of 8192 tokens of which the trace uses the lowest part: our
flat part alone needs about 20 values for their padding. Reached from 52 (configuration alone) and 30 (fitted) on."""


@pytest.fixture(scope="module", params=[(trace, limits) for trace in TRACES for limits in CONFIGURATIONS[trace]],
                ids=lambda param: f"{param[0]}-{param[1].max_model_len}")  # fmt: skip
def comparisons(request: pytest.FixtureRequest) -> list[Comparison]:
    trace, limits = request.param
    return compare(trace, TRACES[trace](), limits, GENERATORS)


def test_half_of_their_recipes_from_the_configuration_alone(comparisons: list[Comparison]) -> None:
    for c in comparisons:
        assert c.configured.recipes <= c.theirs.recipes // 2
        assert (c.configured.padding <= c.theirs.padding) is not is_out_of_reach(c), c


def test_a_quarter_of_their_recipes_when_fitted_to_the_other_half(comparisons: list[Comparison]) -> None:
    for c in comparisons:
        assert c.fitted.recipes <= c.theirs.recipes // 4
        assert (c.fitted.padding <= c.theirs.padding) is not is_out_of_reach(c), c


def is_out_of_reach(c: Comparison) -> bool:
    return (c.trace, c.limits.max_model_len, c.generator) in NOT_REACHED


@pytest.mark.parametrize("trace", TRACES)
def test_the_two_halves_of_a_trace_have_no_request_in_common(trace: str) -> None:
    requests = TRACES[trace]()
    fit, judged = halves(requests)
    assert len(fit) + len(judged) == len(requests)
    # Requests are told apart by identity: two of them may have the same lengths.
    assert not {id(request) for request in fit} & {id(request) for request in judged}


def test_the_real_trace_has_the_published_lengths() -> None:
    prompts = sorted(request.prompt for request in TRACES["sharegpt"]())
    assert 15_000 < len(prompts) < 18_000
    assert 25 <= prompts[len(prompts) // 2] <= 45
    assert 150 <= sum(prompts) / len(prompts) <= 400


def test_every_configuration_is_one_the_planner_accepts() -> None:
    for configurations in CONFIGURATIONS.values():
        for limits in configurations:
            assert isinstance(limits, StepLimits)
            assert limits.max_batched_tokens >= max(limits.block_size, limits.max_num_seqs)

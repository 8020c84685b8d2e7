"""What is drawn follows the distribution of transformers' own processors, row by row, and is always a number."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.token_counts import TokenCounts
from hpu_engine.step.logit_adjustments import adjust_logits
from hpu_engine.step.sampler import Draw, Sampled, SamplingFailed, log_probabilities, sample, uniforms
from hpu_engine.step.sampling_cutoffs import HEAD, cutoffs

VOCAB = 40
DRAWS = 6000


def best_of(run: Callable[[], object]) -> float:
    """Seconds of this thread's own."""
    times = []
    for _ in range(5):
        started = time.thread_time()
        run()
        times.append(time.thread_time() - started)
    return min(times)


def logits_of(seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw_of(params: SamplingParams, seed: int = 0, tokens: tuple[int, ...] = (1,), prompt_len: int = 1) -> Draw:
    return Draw(params, seed, tokens, prompt_len)


def tokens_of(results: list[Sampled | SamplingFailed]) -> list[int]:
    assert all(isinstance(result, Sampled) for result in results)
    return [result.token for result in results if isinstance(result, Sampled)]


def reference(logits: torch.Tensor, params: SamplingParams, tokens: tuple[int, ...]) -> torch.Tensor:
    """Probabilities by transformers, in the order in which its `generate` applies them."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([tokens]), logits[None].clone())[0].softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_p": 0.05},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_frequencies_follow_transformers(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    logits, tokens = logits_of(), (3, 3, 7)
    expected = reference(logits, params, tokens)
    draws = [draw_of(params, seed, tokens, 3) for seed in range(DRAWS)]
    counts = Counter(tokens_of(sample(logits.repeat(DRAWS, 1), draws)))
    assert all(expected[token] > 0 for token in counts), "a token outside of the allowed set"
    likely = (expected * DRAWS >= 5).nonzero()[:, 0].tolist()
    chi_square = sum(
        (counts[token] - DRAWS * float(expected[token])) ** 2 / (DRAWS * float(expected[token])) for token in likely
    )
    # Wilson and Hilferty 1931: beyond this with a probability of about 1e-4. The seeds are fixed, so it never flickers.
    freedom = max(1, len(likely) - 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit, (chi_square, limit)


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3, 2.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_a_nucleus_wider_than_what_is_sorted_is_found(spread: float, top_p: float) -> None:
    vocab = 12 * HEAD
    rows = torch.stack([logits_of(seed, vocab=vocab, spread=spread) for seed in range(4)])
    weights = (rows - rows.amax(-1, keepdim=True)).exp()
    for top_k in (0, 2 * HEAD, HEAD, HEAD + 1, 5):
        params = SamplingParams(top_p=top_p, top_k=top_k)
        found = cutoffs(weights, [params] * 4)
        for row, edge in zip(weights.double(), found, strict=True):
            ordered = row.sort(descending=True).values
            left = ordered[: top_k or vocab]
            # Equals of the last one by top-k stay, and count.
            left = ordered[ordered >= left[-1]]
            stays = left.cumsum(0) - left < top_p * left.sum()
            expected = int(stays.sum())
            count = int((row >= edge.double()).sum())
            ties = int((row == left[expected - 1]).sum())
            assert abs(count - expected) <= max(ties, 1), (count, expected)


def test_a_flat_row_costs_little_more_than_a_peaked_one() -> None:
    """Sorting 8 rows of a real vocabulary takes several times as long."""
    params = [SamplingParams(top_p=0.9)] * 8
    flat = torch.rand(8, 49152, generator=torch.Generator().manual_seed(1))
    flat[:, 0] = 1.0
    assert best_of(lambda: cutoffs(flat, params)) < 0.7 * best_of(lambda: flat.sort(dim=-1, descending=True))


def test_a_wide_top_k_of_one_row_costs_the_others_nothing() -> None:
    """Sorting all 16 rows as far as the widest `top_k` takes many times as long."""
    vocab = 49152
    weights = torch.rand(16, vocab, generator=torch.Generator().manual_seed(1)) / vocab
    weights[:, 0] = 1.0
    narrow = [SamplingParams(top_p=0.5)] * 16
    for wide in (SamplingParams(top_k=vocab - 1), SamplingParams(top_k=20000), SamplingParams(top_k=HEAD + 1)):
        mixed = [*narrow[:-1], wide]
        expected = cutoffs(weights, narrow)
        expected[-1] = weights[-1].sort(descending=True).values[wide.top_k - 1]
        assert torch.equal(cutoffs(weights, mixed), expected)
        assert best_of(lambda mixed=mixed: cutoffs(weights, mixed)) < 2 * best_of(lambda: cutoffs(weights, narrow))  # type: ignore[misc]


def test_a_row_is_drawn_alike_whatever_stands_beside_it() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 3},
        {"temperature": 0.0},
        {"min_p": 0.2},
        {"temperature": 1.9, "top_k": 300},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    ]
    draws = [draw_of(SamplingParams(**own), seed, (1, 2, 2), 1) for seed, own in enumerate(options * 4)]
    rows = torch.stack([logits_of(seed, vocab=700) for seed in range(len(draws))])
    together = tokens_of(sample(rows.clone(), draws))
    alone = [tokens_of(sample(row[None].clone(), [draw]))[0] for row, draw in zip(rows, draws, strict=True)]
    assert together == alone


def test_uniforms_are_uniform_and_depend_on_seed_and_position_only() -> None:
    by_seed = uniforms([draw_of(SamplingParams(), seed) for seed in range(20_000)])
    by_position = uniforms([Draw(SamplingParams(), 7, range(length), 1) for length in range(20_000)])
    for drawn in (by_seed, by_position):
        assert 0.0 <= float(drawn.min()) < float(drawn.max()) < 1.0
        shares = torch.histc(drawn.float(), bins=20, min=0, max=1) / 20_000
        assert float((shares - 0.05).abs().max()) < 0.008
    assert float(torch.corrcoef(torch.stack((by_seed[:-1], by_seed[1:])))[0, 1].abs()) < 0.03
    assert torch.equal(by_seed[5:6], uniforms([draw_of(SamplingParams(temperature=0.3), 5)]))


def test_greedy_and_tiny_temperatures_take_the_best() -> None:
    logits = logits_of()
    for temperature in (0.0, 1e-9, 9e-6):
        (token,) = tokens_of(sample(logits[None].clone(), [draw_of(SamplingParams(temperature=temperature))]))
        assert token == int(logits.argmax())


def test_logit_bias_and_min_tokens_and_penalties_change_what_they_say() -> None:
    row = torch.zeros(6)
    params = SamplingParams(
        logit_bias={2: 5.0}, min_tokens=2, stop_token_ids=(4,), presence_penalty=1.0, frequency_penalty=0.5
    )
    adjust_logits(row, params, [0, 1, 3, 3], 3, TokenCounts())
    assert row.tolist() == [0.0, 0.0, 5.0, -1.5, -math.inf, 0.0]
    row = torch.zeros(6)
    adjust_logits(row, params, [0, 3, 3], 1, TokenCounts())
    assert row.tolist() == [0.0, 0.0, 5.0, -2.0, 0.0, 0.0]


def penalized(logits: torch.Tensor, params: SamplingParams, tokens: list[int], prompt_len: int) -> torch.Tensor:
    """As said in words, over all tokens anew."""
    row = logits.clone()
    for token in set(tokens):
        penalty = params.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token, times in Counter(tokens[prompt_len:]).items():
        row[token] -= params.presence_penalty + params.frequency_penalty * torch.tensor(float(times))
    return row


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60),
    prompt_len=st.integers(1, 60),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.7, -1.1]),
    frequency=st.sampled_from([0.0, 0.3, -2.0]),
)
def test_penalties_kept_up_with_each_token_are_those_of_all_tokens(
    tokens: list[int], prompt_len: int, repetition: float, presence: float, frequency: float
) -> None:
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    counts = TokenCounts()
    prompt_len = min(prompt_len, len(tokens))
    for end in range(prompt_len, len(tokens) + 1):
        row = logits_of(end)
        adjust_logits(row, params, tokens[:end], prompt_len, counts)
        assert torch.equal(row, penalized(logits_of(end), params, tokens[:end], prompt_len))


def test_penalties_after_many_tokens_cost_what_they_cost_after_few() -> None:
    params = SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5)
    row = logits_of()

    def steps(tokens: list[int]) -> Callable[[], object]:
        counts = TokenCounts()
        counts.count(tokens, 10)

        def run() -> None:
            for token in range(20):
                tokens.append(token)
                adjust_logits(row, params, tokens, 10, counts)

        return run

    few, many = list(range(VOCAB)), list(range(VOCAB)) * 1000
    assert best_of(steps(many)) < 3 * best_of(steps(few))


def test_logprobs_are_the_models_own_and_finite() -> None:
    logits = logits_of()
    logits[5] = -math.inf
    params = SamplingParams(temperature=0.3, top_k=2, logit_bias={9: 50.0}, logprobs=VOCAB // 2)
    (result,) = sample(logits[None].clone(), [draw_of(params)])
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    expected = logits.log_softmax(-1)
    assert result.logprobs.token_id == result.token == 9
    assert result.logprobs.logprob == pytest.approx(float(expected[9]), abs=1e-5)
    best = expected.topk(VOCAB // 2)
    assert [token for token, _ in result.logprobs.top] == best.indices.tolist()
    (all_of_them,) = sample(logits[None].clone(), [draw_of(SamplingParams(logprobs=VOCAB))])
    assert isinstance(all_of_them, Sampled)
    assert all_of_them.logprobs is not None
    assert all(math.isfinite(value) for _, value in all_of_them.logprobs.top)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_without_numbers_fails_alone(poison: float) -> None:
    rows = torch.stack([logits_of(1), logits_of(2), logits_of(3)])
    expected = tokens_of(sample(rows.clone(), [draw_of(SamplingParams(seed=1), 1)] * 3))
    rows[1, 4] = poison
    results = sample(rows, [draw_of(SamplingParams(seed=1), 1)] * 3)
    assert isinstance(results[1], SamplingFailed)
    assert [result.token for result in (results[0], results[2]) if isinstance(result, Sampled)] == [
        expected[0],
        expected[2],
    ]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_row_without_numbers_has_no_log_probabilities(poison: float) -> None:
    row = logits_of()
    row[4 if poison != -math.inf else slice(None)] = poison
    for token in (4, 5):
        with pytest.raises(SamplingFailed, match="not finite"):
            log_probabilities(row, token, 3)


@settings(max_examples=80, deadline=None)
@given(
    temperature=st.floats(0.0, 1e30),
    top_p=st.floats(1e-30, 1.0, exclude_min=True),
    top_k=st.integers(0, 100),
    min_p=st.floats(0.0, 1.0),
    repetition=st.floats(1e-3, 1e3),
    spread=st.sampled_from([0.0, 1e-20, 1.0, 1e4, 1e30]),
    seed=st.integers(-(2**62), 2**62),
)
def test_any_legal_parameters_give_a_token(
    temperature: float, top_p: float, top_k: int, min_p: float, repetition: float, spread: float, seed: int
) -> None:
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition, logprobs=3
    )
    (result,) = sample(logits_of(spread=spread)[None].clone(), [draw_of(params, seed)])
    assert isinstance(result, Sampled)
    assert 0 <= result.token < VOCAB
    assert result.logprobs is not None
    assert all(math.isfinite(value) for _, value in result.logprobs.top)

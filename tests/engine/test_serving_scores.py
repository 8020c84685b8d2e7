"""Scores, samples and adjusted logits of the real worker over HTTP, against transformers where it has the numbers."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.server.running import PATIENCE_SECONDS, RunningServer, post, wait_until

VOCAB = 320
MODEL_LEN = 512


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[RunningServer]:
    """Chunks and blocks smaller than the prompts."""
    flags: dict[str, Any] = {"dtype": "float32", "max_model_len": MODEL_LEN, "num_kv_blocks": 256, "block_size": 16}
    with RunningServer(tiny_llama, max_num_batched_tokens=32, max_num_seqs=16, **flags) as server:
        yield server.wait_until_ready()


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


def log_probabilities(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocab]"""
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0]
        return logits.log_softmax(-1)


def a_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def loglikelihoods(answer: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """As lm-eval's `local-completions` reads an answer: the last token is the one that had to be generated."""
    found = []
    for choice, start in zip(sorted(answer["choices"], key=lambda one: one["index"]), context_lengths, strict=True):
        scores = choice["logprobs"]
        own = scores["token_logprobs"][start:-1]
        best = [max(top.values()) for top in scores["top_logprobs"][start:-1]]
        found.append((sum(own), own == best))
    return found


def test_lm_evals_loglikelihoods_are_those_of_transformers(server: RunningServer, reference: Any) -> None:
    contexts = [a_prompt(length, length) for length in (1, 15, 40, 130)]
    prompts = []
    for place, context in enumerate(contexts):
        continuation = a_prompt(9, 99)
        if place % 2:  # the greedy continuation: one of lm-eval's two questions must be answered with yes
            continuation = []
            for _ in range(9):
                continuation.append(int(log_probabilities(reference, context + continuation)[-1].argmax()))
        prompts.append(context + continuation)
    body = {
        "model": "tiny",
        "prompt": prompts,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "seed": 1,
        "echo": True,
    }
    for _ in range(2):  # the second time every prompt is in the prefix cache
        status, answer = post(f"{server.url}/v1/completions", body)
        assert status == 200
        found = loglikelihoods(answer, [len(context) for context in contexts])
        for (total, is_greedy), context, prompt, place in zip(found, contexts, prompts, range(4), strict=True):
            expected = log_probabilities(reference, prompt)
            places = range(len(context), len(prompt))
            assert total == pytest.approx(sum(float(expected[i - 1, prompt[i]]) for i in places), abs=2e-3)
            assert is_greedy == bool(place % 2)
        assert [choice["logprobs"]["token_logprobs"][0] for choice in answer["choices"]] == [None] * 4


def test_scores_of_an_answer_are_the_models_own_whatever_is_done_to_the_logits(
    client: openai.OpenAI, reference: Any
) -> None:
    prompt = a_prompt(30, 5)
    options: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "logprobs": 2, "temperature": 1.5}
    extra = {"ignore_eos": True, "skip_special_tokens": False, "prompt_logprobs": 0}
    choice = client.completions.create(logit_bias={"77": 100}, extra_body=extra, seed=3, **options).choices[0]
    assert choice.logprobs is not None
    expected = log_probabilities(reference, prompt + [77] * 6)
    own = [float(expected[place, 77]) for place in range(29, 35)]
    assert choice.logprobs.token_logprobs == pytest.approx(own, abs=1e-3)
    assert len(set(choice.logprobs.tokens or [])) == 1


def test_a_chat_is_scored_like_the_completion_of_its_prompt(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": "hello"}]
    text = "<role>user\nhello<eos>\n<role>assistant\n"
    extra = {"ignore_eos": True}
    chat = client.chat.completions.create(
        model="tiny", messages=turns, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3, extra_body=extra
    ).choices[0]
    completion = client.completions.create(
        model="tiny",
        prompt=text,
        max_tokens=8,
        temperature=0,
        logprobs=3,
        extra_body={**extra, "add_special_tokens": False},
    ).choices[0]
    assert chat.logprobs is not None
    assert completion.logprobs is not None
    content = chat.logprobs.content or []
    assert [token.token for token in content] == completion.logprobs.tokens
    assert [token.logprob for token in content] == pytest.approx(completion.logprobs.token_logprobs)
    for token in content:
        assert token.top_logprobs[0].logprob == max(one.logprob for one in token.top_logprobs) == token.logprob


def test_samples_with_a_seed_differ_and_come_again(client: openai.OpenAI) -> None:
    prompt = a_prompt(50, 6)

    def ask(n: int, seed: int) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=prompt, n=n, seed=seed, max_tokens=12, temperature=1, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in answer.choices]

    first = ask(6, 7)
    assert len(set(first)) == 6
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        again = list(pool.map(ask, (6, 4, 1, 6), (7, 7, 7, 8)))
    assert again[:3] == [first, first[:4], first[:1]], "whatever runs beside it, and however many are asked for"
    assert not {*again[3]} & {*first}
    unseeded = client.completions.create(model="tiny", prompt=prompt, n=6, max_tokens=12)
    assert len({choice.text for choice in unseeded.choices}) == 6


def test_samples_are_reproducible_where_a_pool_is_too_small_for_all_of_them(
    tiny_llama: Path, server: RunningServer
) -> None:
    body = {"prompt": a_prompt(60, 8), "n": 8, "seed": 11, "max_tokens": 60, "ignore_eos": True, "logprobs": 0}
    expected = post(f"{server.url}/v1/completions", body)[1]["choices"]
    flags: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "num_kv_blocks": 20, "block_size": 16}
    with RunningServer(tiny_llama, **flags).wait_until_ready() as small:
        status, answer = post(f"{small.url}/v1/completions", body)
        assert status == 200
        assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in expected]
        assert answer["usage"]["completion_tokens"] == 8 * 60, "no token lost, repeated or counted twice"
        assert small.metric("vllm:num_preemptions_total") > 0, "nobody was preempted; this proves nothing"


def test_samples_share_the_blocks_of_their_prompt(server: RunningServer) -> None:
    queries, hits = (server.metric(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
    body = {"prompt": a_prompt(100, 9), "n": 5, "max_tokens": 4, "ignore_eos": True}
    assert post(f"{server.url}/v1/completions", body)[0] == 200
    wait_until(lambda: server.metric("vllm:prefix_cache_queries_total") == queries + 500, "queries counted", server)
    # 100 tokens are 6 full blocks of 16, and the first sample computes them.
    assert server.metric("vllm:prefix_cache_hits_total") == hits + 4 * 96


def test_the_times_of_a_request_add_up(server: RunningServer) -> None:
    """Waiting, prefill and decoding, however long each is: here three prompts for a budget of one at a time."""
    kinds = ("request_queue", "request_prefill", "request_decode")
    names = [f"vllm:{kind}_time_seconds" for kind in kinds] + ["vllm:e2e_request_latency_seconds"]
    before = [(server.metric(f"{name}_sum"), server.metric(f"{name}_count")) for name in names]
    body = {"prompt": [a_prompt(300, seed) for seed in (31, 32, 33)], "max_tokens": 10, "ignore_eos": True}
    assert post(f"{server.url}/v1/completions", body)[0] == 200
    seconds = [server.metric(f"{name}_sum") - old for name, (old, _) in zip(names, before, strict=True)]
    counts = [server.metric(f"{name}_count") - old for name, (_, old) in zip(names, before, strict=True)]
    assert counts == [3, 3, 3, 3]
    assert all(part > 0 for part in seconds)
    # Between the last token and the moment that is counted as its arrival the process may have to wait for a core.
    assert sum(seconds[:3]) == pytest.approx(seconds[3], abs=0.5, rel=0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_every_sample(server: RunningServer, stream: bool) -> None:
    body = {
        "prompt": [a_prompt(90, 1), a_prompt(20, 2)],
        "n": 6,
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": stream,
    }
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    for wanted in (1, 12):  # while the others still wait for the prompt's blocks, and while all run
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_SECONDS) as raw:
            raw.sendall(head + data)
            wait_until(lambda wanted=wanted: server.state().ranks[0].running >= wanted, "samples run", server)
        wait_until(lambda: server.state().ranks[0].kv_blocks_used == 0, "all blocks are free", server)
        rank = server.state().ranks[0]
        assert (rank.running, rank.waiting) == (0, 0)
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 24


def test_logits_are_changed_as_asked(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> list[str]:
        extra = {"ignore_eos": True, "skip_special_tokens": False, **options.pop("extra", {})}
        choice = client.completions.create(
            model="tiny", prompt=a_prompt(20, 4), max_tokens=8, logprobs=0, temperature=0, extra_body=extra, **options
        ).choices[0]
        assert choice.logprobs is not None
        return choice.logprobs.tokens or []

    plain = ask()
    two = {"80": 100, "81": 99}
    assert len(set(ask(logit_bias={"80": 100}))) == 1
    assert len(set(ask(logit_bias=two, frequency_penalty=2))) == 2, "the repeated one falls behind the other"
    many = {str(token): 100 for token in range(80, 90)}
    wandering, faithful = (ask(logit_bias=many, presence_penalty=penalty) for penalty in (2, -2))
    assert len(set(wandering)) > len(set(faithful))
    assert len(set(ask(logit_bias={"80": 20, "81": 19.5}, extra={"repetition_penalty": 3}))) > 1
    assert ask(extra={"min_p": 1.0, "temperature": 1.7}) == plain, "only the most likely token stays"


def test_min_tokens_keep_the_end_away(server: RunningServer) -> None:
    body: dict[str, Any] = {"prompt": a_prompt(20, 4), "max_tokens": 20, "temperature": 0, "logit_bias": {"2": 100}}
    assert post(f"{server.url}/v1/completions", body)[1]["usage"]["completion_tokens"] == 1
    answer = post(f"{server.url}/v1/completions", {**body, "min_tokens": 9})[1]
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["choices"][0]["finish_reason"] == "stop"


EXTREMES = st.fixed_dictionaries(
    {"max_tokens": st.integers(0, 3), "echo": st.just(True)},
    optional={
        "n": st.integers(1, 4),
        "temperature": st.sampled_from([0, 1e-12, 1e-5, 1.1e-5, 2]),
        "top_p": st.sampled_from([1e-30, 0.5, 1]),
        "top_k": st.sampled_from([-1, 0, 1, 10**12]),
        "min_p": st.sampled_from([0, 1e-30, 1]),
        "repetition_penalty": st.sampled_from([0.001, 1, 1000]),
        "presence_penalty": st.sampled_from([-2, 2]),
        "frequency_penalty": st.sampled_from([-2, 2]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1).map(str), st.sampled_from([-100, 1e-30, 100]), max_size=VOCAB
        ),
        "logprobs": st.integers(0, 20),
        "prompt_logprobs": st.integers(0, 20),
        "seed": st.integers(-(2**63) + 1, 2**63 - 1),
        "prompt": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
        "stop": st.sampled_from(["a", " ", "\ufffd"]),
        "skip_special_tokens": st.booleans(),
    },
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=EXTREMES)
def test_every_legal_combination_is_answered_in_finite_numbers(server: RunningServer, body: dict[str, Any]) -> None:
    data = json.dumps({"prompt": [5, 6, 7], **body}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as raw:
        answer = json.loads(raw.read(), parse_constant=pytest.fail)
    assert len(answer["choices"]) == body.get("n", 1)
    for choice in answer["choices"]:
        if "logprobs" in body:
            scores = choice["logprobs"]
            assert scores["token_logprobs"][0] is None
            assert all(isinstance(number, float | int) and number <= 0 for number in scores["token_logprobs"][1:])
            assert len({len(column) for column in scores.values()}) == 1
            assert all(0 <= offset <= len(choice["text"]) for offset in scores["text_offset"])

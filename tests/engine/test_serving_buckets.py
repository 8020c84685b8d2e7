"""`--force-buckets` over HTTP: every shape is warm before the first answer, and the answers are the same."""

from __future__ import annotations

import concurrent.futures
import random
import re
from pathlib import Path
from typing import Any

import openai

from tests.server.running import RunningServer, get

FLAGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 6, "block_size": 32, "num_kv_blocks": 40, "exact": True}
COUNTER = re.compile(rb"^hpu_engine:first_seen_shapes_total\{.*\} ([0-9.]+)$", re.MULTILINE)


def asked(seed: int) -> dict[str, Any]:
    """One request: what is sampled, scored and shared changes from one to the next."""
    chance = random.Random(seed)
    extra: dict[str, Any] = {"ignore_eos": True}
    if chance.random() < 0.5:
        extra |= {"top_k": 20, "repetition_penalty": 1.2}
    return {
        "model": "tiny",
        "prompt": " ".join(
            chance.choice(["one", "two", "blocks", "of", "cards"]) for _ in range(chance.randint(1, 80))
        ),
        "max_tokens": chance.randint(1, 12),
        "temperature": chance.choice([0.0, 1.0]),
        "top_p": chance.choice([1.0, 0.8]),
        "logprobs": chance.choice([None, None, 2]),
        "n": chance.choice([1, 1, 3]),
        "seed": seed,
        "extra_body": extra,
    }


def served(model: Path, requests: list[dict[str, Any]], **flags: Any) -> tuple[list[list[str]], float, int, int]:
    """Texts of each request's choices, the counter in /metrics and in /state, and how many shapes were warmed."""
    with RunningServer(model, **FLAGS, **flags) as server:
        server.wait_until_ready()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=280)
        with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(lambda request: client.completions.create(**request), requests))
        status, metrics = get(f"{server.control_url}/metrics")
        assert status == 200
        found = COUNTER.search(metrics)
        assert found is not None
        state = server.state().ranks[0]
        assert state.warm_up.done == state.warm_up.total
        took = [run.seconds for run in state.warm_up.runs]
        assert len(took) == state.warm_up.total
        assert all(took), "each shape took its time"
        texts = [[choice.text for choice in answer.choices] for answer in answers]
        return texts, float(found[1]), state.first_seen_shapes, state.warm_up.total


def test_a_tiny_model_answers_alike_and_meets_no_new_shape(tiny_llama: Path) -> None:
    requests = [asked(seed) for seed in range(16)]
    padded, counted, stated, warmed = served(tiny_llama, requests, force_buckets=True)
    assert (counted, stated) == (0.0, 0)
    assert warmed > 40
    plain, counted, stated, warmed = served(tiny_llama, requests)
    assert plain == padded
    assert counted == stated > 0
    assert warmed < 20


def test_a_real_model_meets_no_new_shape(smollm2: Path) -> None:
    texts, counted, stated, _ = served(smollm2, [asked(seed) for seed in range(8)], force_buckets=True)
    assert all(text for choices in texts for text in choices)
    assert (counted, stated) == (0.0, 0)

"""`hpu-engine serve` on every family: answers over HTTP are transformers' own, streamed, whole, alone and together."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoTokenizer

from hpu_engine.model.weights.safetensors_files import list_tensors
from tests.engine.test_greedy_parity import TIE, reference_of
from tests.models.tiny import FAMILIES, tiny
from tests.models.upcycled import smollm2_ernie_moe
from tests.server.running import RunningServer

LONG = "Many small rows share one step. 12\t3.5 你好🙂 " * 6
PROMPTS = ["Blocks hold what", LONG, "def step(rows):\n\treturn", LONG + LONG, "a", "ž🙂"]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Path, RunningServer]]:
    directory = tiny(request.param)
    flags: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 1024,
        "block_size": 32,
        "num_kv_blocks": 128,
        "max_num_batched_tokens": 96,
    }
    with RunningServer(directory, **flags) as server:
        yield directory, server.wait_until_ready()


def test_answers_are_greedy_and_the_same_alone_together_and_streamed(served: tuple[Path, RunningServer]) -> None:
    """The long prompts are cut into chunks of at most 96 tokens that share their steps with decoding rows."""
    directory, server = served
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    settings: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}

    def whole(prompt: str) -> str:
        return str(client.completions.create(prompt=prompt, **settings).choices[0].text)

    def streamed(prompt: str) -> str:
        chunks = client.completions.create(prompt=prompt, stream=True, **settings)
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)

    alone = [whole(prompt) for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(streamed, PROMPTS)) == alone
    tokenizer, reference = AutoTokenizer.from_pretrained(directory), reference_of(str(directory))
    decided = 0
    for prompt, text in zip(PROMPTS, alone, strict=True):
        expected, margin = continuation(reference, tokenizer.encode(prompt))
        if margin > TIE:
            assert text == tokenizer.decode(expected, skip_special_tokens=True)
            decided += 1
    assert decided >= len(PROMPTS) // 2


def continuation(reference: Any, prompt: list[int]) -> tuple[list[int], float]:
    """transformers' next 24 tokens, and the smallest distance by which its best logit won."""
    tokens = list(prompt)
    margin = float("inf")
    with torch.inference_mode():
        for _ in range(24):
            best = reference(torch.tensor([tokens])).logits[0, -1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], margin


def test_a_mixture_of_experts_with_real_weights_chats() -> None:
    flags: dict[str, Any] = {"served_model_name": "moe", "max_model_len": 1024, "num_kv_blocks": 16, "max_num_seqs": 8}
    with RunningServer(smollm2_ernie_moe(), **flags) as server:
        server.wait_until_ready()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        question: Any = [{"role": "user", "content": "Please tell me the capital of France."}]
        chunks = client.chat.completions.create(model="moe", messages=question, temperature=0, stream=True)
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        state = server.state()
    assert text == "The capital of France is Paris."
    stored = sum(math.prod(tensor.shape) for tensor in list_tensors(smollm2_ernie_moe()).values())
    assert stored > 500_000_000
    assert (state.model.architecture, state.model.parameters) == ("Ernie4_5_MoeForCausalLM", stored)

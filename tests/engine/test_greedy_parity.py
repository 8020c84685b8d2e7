"""Greedy tokens are transformers' own, in float32, one request at a time and all together.

The reference is computed along our tokens: at each position transformers' best token must be ours, or its two best
logits must lie within `TIE`. By induction that is the same as comparing with its `generate`, up to such ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig
from tests.engine.direct import open_quietly, run_alone, run_together
from tests.models.smollm2 import smollm2
from tests.models.tiny import tiny

TIE = 1e-3
NUM_PROMPTS = 32
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
SENTENCES = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In 1969, 3 astronauts\tflew to the moon and",
    "你好，世界！🙂 Translate:",
    "Once upon a time there was a small town by the sea where",
    "Water boils at 100 degrees because",
    "List three colours:",
    "Q: What is 17 + 25?\nA:",
)


def prompts(path: str) -> list[list[int]]:
    """32 prompts of 1 to about 300 tokens, some just around the block size of 128."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    encoded = [tokenizer.encode(sentence) for sentence in SENTENCES]
    long = [token for tokens in encoded for token in tokens] * 8
    lengths = (1, 2, 3, 5, 17, 63, 64, 65, 126, 127, 128, 129, 130, 200, 255, 256, 257, 300, 31, 90, 150, 7, 11, 99)
    return encoded + [long[number : number + length] for number, length in enumerate(lengths)]


def assert_is_greedy(reference: Any, prompt: Sequence[int], output: Sequence[int]) -> None:
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *output]])).logits[0].float()
    chosen_at = logits[len(prompt) - 1 : len(prompt) - 1 + len(output)]
    best = chosen_at.topk(2, dim=-1)
    for position, token in enumerate(output):
        first, second = best.values[position].tolist()
        expected = int(best.indices[position, 0])
        assert token == expected or first - second <= TIE, (
            f"token {position} after a prompt of {len(prompt)} is {token}, transformers has {expected} "
            f"with {first - second:.6f} before the next"
        )


def reference_of(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.timeout(3000)
def test_smollm2_equals_transformers_alone_and_together() -> None:
    path = str(smollm2())
    rank = open_quietly(EngineConfig(model=path, dtype="float32", num_kv_blocks=128))
    asked = prompts(path)
    assert len(asked) == NUM_PROMPTS
    together = run_together(rank, asked, GREEDY)
    alone = run_alone(rank, asked, GREEDY)
    reference = reference_of(path)
    for prompt, first, second in zip(asked, together, alone, strict=True):
        assert len(first) == len(second) == 64
        assert_is_greedy(reference, prompt, first)
        if second != first:
            assert_is_greedy(reference, prompt, second)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "ernie4_5"])
def test_tiny_models_of_every_dense_family_equal_transformers(family: str) -> None:
    path = str(tiny(family))
    settings = {"block_size": 32, "num_kv_blocks": 256, "max_num_batched_tokens": 96}
    rank = open_quietly(EngineConfig(model=path, dtype="float32", **settings))  # type: ignore[arg-type]
    asked = [[3 + (7 * number + 11 * i) % 300 for i in range(length)] for number, length in enumerate((1, 2, 127, 300))]
    reference = reference_of(path)
    for prompt, output in zip(asked, run_together(rank, asked, GREEDY), strict=True):
        assert_is_greedy(reference, prompt, output)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rotary_scalings_equal_transformers(scaling: dict[str, Any]) -> None:
    path = str(tiny("llama", rope_parameters={"rope_theta": 10000.0, **scaling}))
    rank = open_quietly(EngineConfig(model=path, dtype="float32", num_kv_blocks=64))
    prompt = [3 + (11 * i) % 300 for i in range(500)]
    assert_is_greedy(reference_of(path), prompt, run_together(rank, [prompt], GREEDY)[0])

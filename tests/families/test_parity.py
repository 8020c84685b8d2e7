"""Logits are transformers' own within 1e-4 in float32, for every family, however the tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families.sequences import Sequences, open_sequences, random_tokens, reference_logits
from tests.models.tiny import VOCAB_SIZE, tiny

LENGTH = 75
"""Several blocks and a part of one."""

ERNIE = [
    {"moe_layer_start_index": start, "moe_num_shared_experts": shared, "moe_layer_interval": interval}
    for start in (0, 1)
    for shared in (0, 1, 2)
    for interval in (1, 2)
]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CHECKPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    *[("llama", {"rope_parameters": rope}) for rope in (LINEAR, LLAMA3, YARN)],
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("ernie4_5", {}),
    ("ernie4_5", {"tie_word_embeddings": True, "use_bias": True}),
    ("mixtral", {}),
    ("mixtral", {"tie_word_embeddings": True}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
    ("ernie4_5_moe", {"tie_word_embeddings": True}),
    ("ernie4_5_moe", {"use_bias": True}),
    ("ernie4_5_moe", {"moe_layer_end_index": 2}),
    *[("ernie4_5_moe", changes) for changes in ERNIE],
]


def prefill(sequences: Sequences) -> None:
    sequences.step([(0, LENGTH)])
    sequences.step([(1, LENGTH), (2, LENGTH)])


def chunked(sequences: Sequences) -> None:
    """Chunks below, at and above the block size of 16, aligned and not."""
    for pieces in ((7, 16, 17, 35), (32, 32, 11), (40, 3, 32)):
        index = next(i for i in range(3) if sequences.computed[i] == 0)
        for piece in pieces:
            sequences.step([(index, piece)])


def decode(sequences: Sequences) -> None:
    sequences.step([(0, 50), (1, 50), (2, 50)])
    for _ in range(LENGTH - 50):
        sequences.step([(0, 1), (1, 1), (2, 1)])


def mixed(sequences: Sequences) -> None:
    """Prefill rows and decode rows of different ages in one step."""
    sequences.step([(0, 60)])
    sequences.step([(1, 33), (0, 1)])
    for piece in (20, 30, 25):
        sequences.step([(0, 1), (2, piece), (1, 1)])
    while min(sequences.computed) < LENGTH:
        sequences.step([(i, 1) for i in range(3) if sequences.computed[i] < LENGTH])


WAYS: dict[str, Callable[[Sequences], None]] = {
    "prefill": prefill,
    "chunked": chunked,
    "decode": decode,
    "mixed": mixed,
}


def name_of(checkpoint: tuple[str, dict[str, Any]]) -> str:
    family, changes = checkpoint
    short = [f"{key.rsplit('_', 1)[-1]}={value}" for key, value in changes.items() if not isinstance(value, dict)]
    short += [value["rope_type"] for value in changes.values() if isinstance(value, dict)]
    return "-".join([family, *short])


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=name_of)
def compared(request: pytest.FixtureRequest) -> tuple[Sequences, Tensor]:
    family, changes = request.param
    directory = tiny(family, **changes)
    tokens = random_tokens(3, LENGTH, VOCAB_SIZE)
    return open_sequences(directory, tokens), reference_logits(directory, tokens)


@pytest.mark.parametrize("way", WAYS)
def test_logits_equal_transformers(compared: tuple[Sequences, Tensor], way: str) -> None:
    opened, expected = compared
    sequences = Sequences(opened.transformer, opened.caches, opened.tokens)
    WAYS[way](sequences)
    assert sequences.computed == [LENGTH] * 3
    for index in range(3):
        torch.testing.assert_close(sequences.logits(index), expected[index], atol=1e-4, rtol=0)


def test_the_matrix_has_what_makes_the_families_differ() -> None:
    """A checkpoint whose router is constant, or whose bias is zero, would prove nothing about either."""
    from safetensors.torch import load_file

    weights = load_file(tiny("ernie4_5_moe") / "model.safetensors")
    routers = [value for name, value in weights.items() if name.endswith("mlp.gate.weight")]
    biases = [value for name, value in weights.items() if "e_score_correction_bias" in name]
    assert len(routers) == len(biases) == 3
    assert all(value.std() > 0.01 for value in routers + biases)

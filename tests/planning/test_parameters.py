"""Parameters are counted as transformers counts them, for real models and for random small ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_engine.planning import describe
from hpu_engine.planning.model.parameters import parameter_count, tensor_table
from tests.models.tiny import FAMILIES
from tests.planning.facts import ERNIE_21B, published, published_configs


def meta_model(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("name", published_configs())
def test_a_published_model_has_the_parameters_that_transformers_gives_it(name: str) -> None:
    theirs = meta_model(transformers.AutoConfig.for_model(**published_configs()[name]))
    assert parameter_count(published(name)) == sum(p.numel() for p in theirs.parameters())


@st.composite
def small_configs(draw: st.DrawFn, family: str) -> Any:
    layers = draw(st.integers(1, 4))
    kv_heads, groups = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([4, 8]))
    keys: dict[str, Any] = {
        "vocab_size": draw(st.integers(3, 40)),
        "hidden_size": kv_heads * groups * head_dim,
        "intermediate_size": draw(st.integers(1, 20)),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family not in ("qwen2", "ernie4_5_moe"):
        keys["head_dim"] = draw(st.sampled_from([4, 8, 16]))
    if family == "llama":
        keys |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    if family.startswith("qwen3"):
        keys["attention_bias"] = draw(st.booleans())
    if family.startswith("ernie"):
        keys["use_bias"] = draw(st.booleans())
    experts = draw(st.integers(1, 6))
    top_k, width = draw(st.integers(1, experts)), draw(st.integers(1, 12))
    if family == "mixtral":
        keys |= {"num_local_experts": experts, "num_experts_per_tok": top_k}
    if family == "qwen3_moe":
        dense = draw(st.lists(st.integers(0, layers - 1), unique=True))
        keys |= {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": width}
        keys |= {"decoder_sparse_step": draw(st.integers(1, 3)), "mlp_only_layers": dense}
    if family == "ernie4_5_moe":
        keys |= {"moe_num_experts": experts, "moe_k": top_k, "moe_intermediate_size": width}
        keys |= {"moe_num_shared_experts": draw(st.integers(0, 2)), "moe_layer_interval": draw(st.integers(1, 2))}
        start = draw(st.integers(0, layers - 1))
        keys |= {"moe_layer_start_index": start, "moe_layer_end_index": draw(st.integers(start, layers - 1))}
    return getattr(transformers, f"{FAMILIES[family][0]}Config")(**keys)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12)
@given(data=st.data())
def test_a_random_small_model_has_the_parameters_that_transformers_gives_it(family: str, data: st.DataObject) -> None:
    config = data.draw(small_configs(family))
    ours = describe(json.loads(config.to_json_string(use_diff=False)), "config.json")
    assert parameter_count(ours) == sum(p.numel() for p in meta_model(config).parameters())


def test_every_dense_tensor_has_the_name_and_shape_that_transformers_gives_it() -> None:
    config = transformers.AutoConfig.for_model(**published_configs()["Qwen/Qwen3-8B"])
    theirs = {name: tuple(p.shape) for name, p in meta_model(config).named_parameters()}
    ours = {}
    for row in tensor_table(published("Qwen/Qwen3-8B")):
        for layer in range(row.copies):
            ours[row.name.format(layer=layer)] = row.shape
    assert ours == theirs


def test_shared_experts_are_one_mlp_of_their_joint_width() -> None:
    rows = {row.name: row for row in tensor_table(published(ERNIE_21B))}
    assert rows["model.layers.{layer}.mlp.shared_experts.up_proj.weight"].shape == (3072, 2560)
    assert rows["model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"].copies == 27 * 64

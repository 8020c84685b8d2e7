"""A description says what the file says, and refuses what would be computed wrongly, by key and file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from hpu_engine.planning import (
    ModelConfigError,
    ModelConfigErrorKind,
    ModelDescription,
    describe,
    read_model_description,
)
from hpu_engine.planning.model.config_file import CONFIG_LIMIT_BYTES
from tests.planning.facts import ERNIE_300B, published, published_configs

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
ERNIE = LLAMA | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize("name", published_configs())
def test_a_description_survives_a_round_trip_through_json(name: str) -> None:
    model = published(name)
    assert ModelDescription.model_validate_json(model.model_dump_json()) == model


def test_a_description_fits_into_a_termination_message() -> None:
    assert max(len(published(name).model_dump_json()) for name in published_configs()) < 2048


def test_ernie_300b_is_dense_below_its_third_layer_and_has_no_shared_experts() -> None:
    model = published(ERNIE_300B)
    assert model.moe is not None
    assert [model.is_sparse(layer) for layer in (0, 2, 3, 53)] == [False, False, True, True]
    assert (model.moe.shared_experts, model.sparse_layer_count, model.dense_layer_count) == (0, 51, 3)
    assert model.rotary.layout == "interleaved"
    assert model.moe.router.correction_bias


@pytest.mark.parametrize(
    ("start", "end", "interval", "sparse"),
    [(0, -1, 1, (0, 1, 2, 3)), (1, -1, 1, (1, 2, 3)), (0, -1, 2, (1, 3)), (1, 2, 1, (1, 2)), (0, 3, 3, (2,))],
)
def test_sparse_layers_follow_start_end_and_interval(
    start: int, end: int, interval: int, sparse: tuple[int, ...]
) -> None:
    keys = {"moe_layer_start_index": start, "moe_layer_end_index": end, "moe_layer_interval": interval}
    model = describe(ERNIE | keys, "config.json")
    assert model.moe is not None
    assert model.moe.sparse_layers == sparse


def test_qwen3_moe_keeps_the_named_layers_dense() -> None:
    model = describe(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, "config.json")
    assert model.moe is not None
    assert model.moe.sparse_layers == (1,)


def test_both_names_of_the_expert_count_are_read() -> None:
    renamed = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 8}
    assert describe(renamed, "config.json") == describe(QWEN3_MOE, "config.json")


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [
        ({"rope_type": "linear", "factor": 4.0}, "linear"),
        ({"type": "linear", "factor": 4.0}, "linear"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, "yarn"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "llama3"),
    ],
)
def test_rotary_scalings_are_read_under_both_names(scaling: dict[str, Any], kind: str) -> None:
    old = describe(LLAMA | {"rope_scaling": scaling, "rope_theta": 5e5}, "config.json")
    new = describe(LLAMA | {"rope_parameters": scaling | {"rope_theta": 5e5}}, "config.json")
    assert old.rotary == new.rotary
    assert old.rotary.scaling is not None
    assert (old.rotary.scaling.kind, old.rotary.theta) == (kind, 5e5)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Ernie4_5", "Ernie4_5_Moe"])
def test_what_transformers_writes_by_default_is_read_as_transformers_means_it(name: str) -> None:
    theirs = getattr(transformers, f"{name}Config")()
    ours = describe(json.loads(theirs.to_json_string(use_diff=False)), "config.json")
    assert ours.rotary.theta == theirs.rope_parameters["rope_theta"]
    assert (ours.rms_norm_eps, ours.tied_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.heads, ours.kv_heads, ours.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        head_dim,
    )


def test_the_end_of_sequence_is_that_of_config_and_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2, "bos_token_id": 1}))
    assert read_model_description(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    model = read_model_description(tmp_path / "config.json")
    assert (model.eos_token_ids, model.bos_token_id) == ((7, 9, 2), 1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 320}')
    with pytest.raises(ModelConfigError, match=r"generation_config\.json: eos_token_id"):
        read_model_description(tmp_path)


BROKEN, UNSUPPORTED = ModelConfigErrorKind.BROKEN, ModelConfigErrorKind.UNSUPPORTED


@pytest.mark.parametrize(
    ("config", "kind", "key"),
    [
        *[({k: v for k, v in LLAMA.items() if k != key}, BROKEN, key) for key in list(LLAMA)[2:7]],
        ({k: v for k, v in LLAMA.items() if k != "max_position_embeddings"}, BROKEN, "max_position_embeddings"),
        ({"vocab_size": 320}, BROKEN, "model_type"),
        ({k: v for k, v in MIXTRAL.items() if k != "num_key_value_heads"}, BROKEN, "num_key_value_heads"),
        (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, UNSUPPORTED, "architectures"),
        (LLAMA | {"architectures": []}, BROKEN, "architectures"),
        ({"model_type": "mamba"}, UNSUPPORTED, "model_type"),
        (LLAMA | {"num_key_value_heads": 3}, BROKEN, "num_key_value_heads"),
        (LLAMA | {"hidden_size": 66}, BROKEN, "num_attention_heads"),
        (LLAMA | {"head_dim": 15}, BROKEN, "head_dim"),
        (LLAMA | {"num_hidden_layers": 0}, BROKEN, "num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": 10**30}, BROKEN, "num_hidden_layers"),
        (LLAMA | {"vocab_size": True}, BROKEN, "vocab_size"),
        (LLAMA | {"vocab_size": "320"}, BROKEN, "vocab_size"),
        (LLAMA | {"vocab_size": 320.5}, BROKEN, "vocab_size"),
        (LLAMA | {"rms_norm_eps": float("nan")}, BROKEN, "rms_norm_eps"),
        (LLAMA | {"hidden_act": "gelu"}, UNSUPPORTED, "hidden_act"),
        (LLAMA | {"attention_bias": "yes"}, BROKEN, "attention_bias"),
        (LLAMA | {"torch_dtype": "int8"}, UNSUPPORTED, "torch_dtype"),
        (LLAMA | {"eos_token_id": 320}, BROKEN, "eos_token_id"),
        (LLAMA | {"eos_token_id": ["a"]}, BROKEN, "eos_token_id"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, UNSUPPORTED, "rope_scaling.rope_type"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, UNSUPPORTED, "rope_scaling.rope_type"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, BROKEN, "rope_scaling.factor"),
        (LLAMA | {"rope_scaling": 0.5}, BROKEN, "rope_scaling"),
        (LLAMA | {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "default"}}, UNSUPPORTED,
         "partial_rotary_factor"),
        (MIXTRAL | {"sliding_window": 512}, UNSUPPORTED, "sliding_window"),
        (MIXTRAL | {"num_experts_per_tok": 9}, BROKEN, "num_experts_per_tok"),
        (ERNIE | {"moe_layer_end_index": 4}, BROKEN, "moe_layer_end_index"),
        (ERNIE | {"moe_layer_start_index": 3, "moe_layer_end_index": 2}, BROKEN, "moe_layer_start_index"),
        (QWEN3_MOE | {"mlp_only_layers": [4]}, BROKEN, "mlp_only_layers"),
        (LLAMA | {"quantization_config": {"bits": 4}}, BROKEN, "quantization_config.quant_method"),
    ],
)  # fmt: skip
def test_a_bad_configuration_is_refused_by_file_and_key(
    config: dict[str, Any], kind: ModelConfigErrorKind, key: str
) -> None:
    with pytest.raises(ModelConfigError) as caught:
        describe(config, "somewhere/config.json")
    error = caught.value
    assert (error.kind, error.path, error.key) == (kind, "somewhere/config.json", key)
    assert str(error).startswith(f"somewhere/config.json: {key}: ")
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", "null", "\x00\xff", "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"]
)
def test_what_is_not_a_json_object_is_broken(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelConfigError) as caught:
        read_model_description(tmp_path)
    assert (caught.value.kind, caught.value.path) == (BROKEN, str(file))


def test_a_huge_file_is_refused_without_being_parsed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * (CONFIG_LIMIT_BYTES + 1))
    with pytest.raises(ModelConfigError, match="larger than"):
        read_model_description(tmp_path)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "nothing" / "config.json"):
        with pytest.raises(ModelConfigError) as caught:
            read_model_description(path)
        assert caught.value.kind is ModelConfigErrorKind.NOT_FOUND

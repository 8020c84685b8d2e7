"""From the keys of a `config.json` to a ModelDescription: what each family calls its parts and what it leaves out.

Defaults for absent keys are those of transformers' configuration classes (5.x), because that is who wrote the files;
sizes that decide the shape of a tensor have no default. What we would compute wrongly is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hpu_engine.planning.model.config_file import ConfigReader, read_generation_config, read_json_object
from hpu_engine.planning.model.description import (
    Architecture,
    DType,
    ModelDescription,
    Moe,
    Rotary,
    RotaryScaling,
    Router,
)
from hpu_engine.planning.model.errors import ModelConfigErrorKind

MOST_LAYERS = 1024
MOST_EXPERTS = 4096
MOST_WIDTH = 1 << 20
MOST_VOCAB = 1 << 24
MOST_POSITIONS = 1 << 27


@dataclass(frozen=True)
class _Family:
    """What differs between families and is written in no file."""

    architecture: Architecture
    model_type: str
    also_called: tuple[str, ...] = ()
    layout: Literal["half-split", "interleaved"] = "half-split"
    theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    head_dim: int | None = None


_FAMILIES = (
    _Family(Architecture.LLAMA, "llama"),
    _Family(Architecture.MIXTRAL, "mixtral", theta=1e6, rms_norm_eps=1e-5),
    _Family(Architecture.QWEN2, "qwen2", qkv_bias=True),
    _Family(Architecture.QWEN3, "qwen3", qk_norm=True, head_dim=128),
    _Family(Architecture.QWEN3_MOE, "qwen3_moe", qk_norm=True),
    _Family(
        Architecture.ERNIE,
        "ernie4_5",
        ("Ernie4_5_ForCausalLM",),
        layout="interleaved",
        theta=5e5,
        rms_norm_eps=1e-5,
        tied=True,
        head_dim=128,
    ),
    _Family(
        Architecture.ERNIE_MOE,
        "ernie4_5_moe",
        ("Ernie4_5_MoEForCausalLM",),
        layout="interleaved",
        theta=5e5,
        rms_norm_eps=1e-5,
        tied=True,
    ),
)


def read_model_description(path: str | Path) -> ModelDescription:
    """Describe the checkpoint in the directory `path`, or the one whose `config.json` is `path`.

    `generation_config.json` beside it is used where present. Raises ModelConfigError.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    return describe(read_json_object(file), str(file), read_generation_config(file.parent))


def describe(
    config: Mapping[str, Any], source: str, generation_config: Mapping[str, Any] | None = None
) -> ModelDescription:
    """Describe the parsed `config.json` in `config`; `source` names it in errors. Raises ModelConfigError."""
    keys = ConfigReader(config, source)
    family = _family(keys)
    hidden = keys.integer("hidden_size", most=MOST_WIDTH)
    layers = keys.integer("num_hidden_layers", most=MOST_LAYERS)
    heads = keys.integer("num_attention_heads", most=MOST_WIDTH)
    kv_heads = _kv_heads(keys, family, heads)
    vocab = keys.integer("vocab_size", most=MOST_VOCAB)
    max_positions = keys.integer("max_position_embeddings", most=MOST_POSITIONS)
    _refuse_windows(keys, family, max_positions)
    use_bias = keys.boolean("use_bias", default=False) if _is_ernie(family) else False
    attention_bias = use_bias or family.qkv_bias or _declared_bias(keys, family)
    return ModelDescription(
        architecture=family.architecture,
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(keys, family, hidden, heads),
        intermediate=keys.integer("intermediate_size", most=MOST_WIDTH),
        activation=_activation(keys),
        rms_norm_eps=keys.number("rms_norm_eps", most=1.0, default=family.rms_norm_eps),
        max_positions=max_positions,
        tied_embeddings=keys.boolean("tie_word_embeddings", default=family.tied),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias and not family.qkv_bias,
        mlp_bias=use_bias or (family.architecture is Architecture.LLAMA and keys.boolean("mlp_bias", default=False)),
        lm_head_bias=use_bias and family.architecture is Architecture.ERNIE_MOE,
        qk_norm=family.qk_norm,
        rotary=_rotary(keys, family, max_positions),
        moe=_moe(keys, family, layers),
        dtype=_dtype(keys),
        quantization=_quantization(keys),
        bos_token_id=next(iter(_token_ids("bos_token_id", keys, source, generation_config, vocab)), None),
        eos_token_ids=_all_token_ids("eos_token_id", keys, source, generation_config, vocab),
    )


def _family(keys: ConfigReader) -> _Family:
    """The family named by `architectures`, or by `model_type` where that list is absent."""
    named = keys.raw("architectures")
    if named is not None:
        if not isinstance(named, list) or not named or not isinstance(named[0], str):
            raise keys.error("architectures", "a list with one class name is needed")
        for family in _FAMILIES:
            if named[0] in (family.architecture.value, *family.also_called):
                return family
        raise keys.error("architectures", _unknown(named[0]), ModelConfigErrorKind.UNSUPPORTED)
    model_type = keys.text("model_type")
    for family in _FAMILIES:
        if family.model_type == model_type:
            return family
    raise keys.error("model_type", _unknown(model_type), ModelConfigErrorKind.UNSUPPORTED)


def _unknown(name: str) -> str:
    supported = ", ".join(family.architecture.value for family in _FAMILIES)
    return f"{name[:60]!r} is not supported; supported are {supported}"


def _is_ernie(family: _Family) -> bool:
    return family.architecture in (Architecture.ERNIE, Architecture.ERNIE_MOE)


def _declared_bias(keys: ConfigReader, family: _Family) -> bool:
    if family.architecture in (Architecture.LLAMA, Architecture.QWEN3, Architecture.QWEN3_MOE):
        return keys.boolean("attention_bias", default=False)
    return False


def _kv_heads(keys: ConfigReader, family: _Family, heads: int) -> int:
    # A null, or an old Llama file without the key, means multi-head attention. The other families have always
    # written it, and their classes' defaults differ: a guess would be a silently wrong shape.
    written = "num_key_value_heads" in keys
    default = heads if family.architecture is Architecture.LLAMA or written else None
    kv_heads = keys.integer("num_key_value_heads", most=MOST_WIDTH, default=default)
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    return kv_heads


def _head_dim(keys: ConfigReader, family: _Family, hidden: int, heads: int) -> int:
    if not keys.has("head_dim") and family.head_dim is None and hidden % heads:
        raise keys.error(
            "num_attention_heads", f"{heads} does not divide hidden_size {hidden}, and head_dim is not given"
        )
    head_dim = keys.integer("head_dim", most=MOST_WIDTH, default=family.head_dim or hidden // heads)
    if head_dim % 2:
        raise keys.error("head_dim", f"must be even for rotary embedding, found {head_dim}")
    return head_dim


def _activation(keys: ConfigReader) -> Literal["silu"]:
    name = keys.text("hidden_act", default="silu")
    if name not in ("silu", "swish"):
        raise keys.error(
            "hidden_act", f"{name[:60]!r} is not supported; supported is silu", ModelConfigErrorKind.UNSUPPORTED
        )
    return "silu"


def _refuse_windows(keys: ConfigReader, family: _Family, max_positions: int) -> None:
    """Sliding-window attention would be computed as full attention: different numbers, no error. Refused."""
    kinds = keys.raw("layer_types")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        raise keys.error("layer_types", "only full_attention layers are supported", ModelConfigErrorKind.UNSUPPORTED)
    if not keys.has("sliding_window"):
        return
    always_on = family.architecture is Architecture.MIXTRAL
    if not always_on and not keys.boolean("use_sliding_window", default=False):
        return
    if keys.integer("sliding_window", most=MOST_POSITIONS) < max_positions:
        raise keys.error(
            "sliding_window",
            f"sliding-window attention is not supported; null, or at least max_position_embeddings {max_positions}",
            ModelConfigErrorKind.UNSUPPORTED,
        )


def _rotary(keys: ConfigReader, family: _Family, max_positions: int) -> Rotary:
    """`rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` beside it (4 and before)."""
    name = "rope_scaling" if keys.has("rope_scaling") else "rope_parameters"
    section = keys.section(name)
    theta = keys.number("rope_theta", most=1e12, default=family.theta)
    if section is None:
        return Rotary(layout=family.layout, theta=theta)
    theta = section.number("rope_theta", most=1e12, default=theta)
    for reader in (section, keys):
        if reader.number("partial_rotary_factor", most=1.0, default=1.0) != 1.0:
            raise reader.error("partial_rotary_factor", "only 1.0 is supported", ModelConfigErrorKind.UNSUPPORTED)
    scaling = _rotary_scaling(section, keys, max_positions)
    return Rotary(layout=family.layout, theta=theta, scaling=scaling)


def _rotary_scaling(section: ConfigReader, keys: ConfigReader, max_positions: int) -> RotaryScaling | None:
    kind = section.text("rope_type", default=section.text("type", default="default"))
    original = keys if keys.has("original_max_position_embeddings") else section
    match kind:
        case "default":
            return None
        case "linear":
            return RotaryScaling(kind="linear", factor=section.number("factor"))
        case "llama3":
            low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
            if high <= low:
                raise section.error("high_freq_factor", f"must be above low_freq_factor {low:g}, found {high:g}")
            return RotaryScaling(
                kind="llama3",
                factor=section.number("factor"),
                original_max_positions=original.integer(
                    "original_max_position_embeddings", most=MOST_POSITIONS, default=max_positions
                ),
                low_freq_factor=low,
                high_freq_factor=high,
            )
        case "yarn":
            trained = original.integer("original_max_position_embeddings", most=MOST_POSITIONS, default=max_positions)
            return RotaryScaling(
                kind="yarn",
                factor=section.number("factor", default=max_positions / trained),
                original_max_positions=trained,
                beta_fast=section.number("beta_fast", default=32.0),
                beta_slow=section.number("beta_slow", default=1.0),
                attention_factor=section.optional_number("attention_factor"),
                mscale=section.optional_number("mscale"),
                mscale_all_dim=section.optional_number("mscale_all_dim"),
                truncate=section.boolean("truncate", default=True),
            )
    raise section.error(
        "rope_type",
        f"{kind[:60]!r} is not supported; supported are default, linear, llama3, yarn",
        ModelConfigErrorKind.UNSUPPORTED,
    )


def _moe(keys: ConfigReader, family: _Family, layers: int) -> Moe | None:
    match family.architecture:
        case Architecture.MIXTRAL:
            return _experts(
                keys,
                experts_key="num_local_experts",
                top_k_key="num_experts_per_tok",
                width_key="intermediate_size",
                sparse_layers=tuple(range(layers)),
                router=Router(correction_bias=False, renormalise=True, logits_dtype="activation"),
            )
        case Architecture.QWEN3_MOE:
            step = keys.integer("decoder_sparse_step", most=MOST_LAYERS, default=1)
            dense = keys.integers("mlp_only_layers", least=0, most=layers - 1)
            return _experts(
                keys,
                experts_key=keys.first_of("num_experts", "num_local_experts"),
                top_k_key="num_experts_per_tok",
                width_key="moe_intermediate_size",
                sparse_layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
                router=Router(
                    correction_bias=False,
                    renormalise=keys.boolean("norm_topk_prob", default=False),
                    logits_dtype="activation",
                ),
            )
        case Architecture.ERNIE_MOE:
            return _experts(
                keys,
                experts_key=keys.first_of("moe_num_experts", "num_experts"),
                top_k_key=keys.first_of("moe_k", "num_experts_per_tok"),
                width_key="moe_intermediate_size",
                sparse_layers=_ernie_sparse_layers(keys, layers),
                shared=keys.integer("moe_num_shared_experts", least=0, most=MOST_EXPERTS, default=2),
                router=Router(
                    correction_bias=True,
                    renormalise=True,
                    renormalise_minimum=keys.number("moe_norm_min", most=1.0, default=1e-12),
                    logits_dtype="float32",
                ),
            )
    return None


def _refuse_other_scoring(keys: ConfigReader) -> None:
    """Checkpoints outside of transformers name how experts are scored; all supported families use softmax."""
    for key in ("scoring_func", "moe_gate_act"):
        scoring = keys.text(key, default="softmax")
        if scoring != "softmax":
            raise keys.error(
                key, f"{scoring[:60]!r} is not supported; supported is softmax", ModelConfigErrorKind.UNSUPPORTED
            )


def _experts(
    keys: ConfigReader,
    *,
    experts_key: str,
    top_k_key: str,
    width_key: str,
    sparse_layers: tuple[int, ...],
    router: Router,
    shared: int = 0,
) -> Moe:
    _refuse_other_scoring(keys)
    experts = keys.integer(experts_key, most=MOST_EXPERTS)
    top_k = keys.integer(top_k_key, most=MOST_EXPERTS)
    if top_k > experts:
        raise keys.error(top_k_key, f"a token cannot choose {top_k} of {experts} experts ({experts_key})")
    return Moe(
        experts=experts,
        top_k=top_k,
        intermediate=keys.integer(width_key, most=MOST_WIDTH),
        shared_experts=shared,
        sparse_layers=sparse_layers,
        router=router,
    )


def _ernie_sparse_layers(keys: ConfigReader, layers: int) -> tuple[int, ...]:
    start = keys.integer("moe_layer_start_index", least=0, most=MOST_LAYERS, default=1)
    end = keys.integer("moe_layer_end_index", least=-1, most=MOST_LAYERS, default=-1)
    interval = keys.integer("moe_layer_interval", most=MOST_LAYERS, default=1)
    last = layers - 1 if end == -1 else end
    if last >= layers:
        raise keys.error("moe_layer_end_index", f"layer {last} does not exist; num_hidden_layers is {layers}")
    if start > last:
        raise keys.error("moe_layer_start_index", f"{start} is behind moe_layer_end_index {last}")
    return tuple(i for i in range(start, last + 1) if (i + 1) % interval == 0)


def _dtype(keys: ConfigReader) -> DType:
    """`dtype` (transformers 5) or `torch_dtype`. Absent: bfloat16, what the cards compute in."""
    key = keys.first_of("dtype", "torch_dtype")
    name = keys.text(key, default="bfloat16").removeprefix("torch.")
    for supported in get_args(DType):
        if name == supported:
            return name  # type: ignore[return-value]
    raise keys.error(
        key,
        f"{name[:60]!r} is not supported; supported are {', '.join(get_args(DType))}",
        ModelConfigErrorKind.UNSUPPORTED,
    )


def _quantization(keys: ConfigReader) -> str | None:
    section = keys.section("quantization_config")
    return section.text(section.first_of("quant_method", "quantization")) if section else None


def _token_ids(
    key: str, keys: ConfigReader, source: str, generation_config: Mapping[str, Any] | None, vocab: int
) -> tuple[int, ...]:
    """Token ids under `key`; `generation_config.json` wins, as it does in transformers' `generate`."""
    if generation_config is not None and generation_config.get(key) is not None:
        beside = source.removesuffix("config.json") + "generation_config.json"
        return ConfigReader(generation_config, beside).integers(key, least=0, most=vocab - 1)
    return keys.integers(key, least=0, most=vocab - 1)


def _all_token_ids(
    key: str, keys: ConfigReader, source: str, generation_config: Mapping[str, Any] | None, vocab: int
) -> tuple[int, ...]:
    """Those of both files: a checkpoint's files often name different ones, and any of them may end an answer."""
    first = _token_ids(key, keys, source, generation_config, vocab)
    return tuple(dict.fromkeys((*first, *keys.integers(key, least=0, most=vocab - 1))))

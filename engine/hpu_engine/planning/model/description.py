"""What a decoder-only transformer is, in numbers: the one description that loader, engine and operator share.

A description is complete and consistent by construction: its users need no defaults and no checks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict

DType = Literal["float32", "bfloat16", "float16"]


class Architecture(StrEnum):
    """The families that can be planned, by the class name that `config.json` carries in `architectures`."""

    LLAMA = "LlamaForCausalLM"
    MIXTRAL = "MixtralForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    QWEN3_MOE = "Qwen3MoeForCausalLM"
    ERNIE = "Ernie4_5ForCausalLM"
    ERNIE_MOE = "Ernie4_5_MoeForCausalLM"


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RotaryScaling(_Fact):
    """How the rotary frequencies are stretched beyond the length the model was first trained on.

    The formulas are those of transformers' `modeling_rope_utils` for the `rope_type` of the same name; a field that
    its kind does not use is None. `attention_factor` None means: derived from `factor` (yarn).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class Rotary(_Fact):
    """Rotary position embedding over the whole head.

    `half-split` rotates element i with i + head_dim/2, `interleaved` rotates elements 2i and 2i + 1 (ERNIE).
    """

    layout: Literal["half-split", "interleaved"]
    theta: float
    scaling: RotaryScaling | None = None


class Router(_Fact):
    """How a token chooses its experts: softmax over all of them, then top-k.

    `correction_bias`: a stored vector [experts] is added to the scores for the choice only; the weights stay unbiased.
    `renormalise`: the chosen weights are divided by max(their sum, `renormalise_minimum`).
    `logits_dtype`: `float32` keeps the router's weight and product in float32; `activation` uses the model's dtype.
    """

    correction_bias: bool
    renormalise: bool
    renormalise_minimum: float = 0.0
    logits_dtype: Literal["activation", "float32"]


class Moe(_Fact):
    """The mixture-of-experts part. `shared_experts` run for every token, as one MLP of `shared_intermediate` width."""

    experts: int
    top_k: int
    intermediate: int
    shared_experts: int
    sparse_layers: tuple[int, ...]
    router: Router

    @property
    def shared_intermediate(self) -> int:
        return self.shared_experts * self.intermediate


class ModelDescription(_Fact):
    """A model as numbers. Sizes count elements, `max_positions` tokens; `intermediate` is that of dense layers.

    `attention_bias` is on q, k and v, `attention_output_bias` on o; `mlp_bias` on every MLP outside routed experts.
    `quantization` is the method named by the checkpoint (`fp8`, ...), None for plain weights of `dtype`.
    `eos_token_ids` are those of `generation_config.json` and `config.json`; the tokenizer's files may name another.
    """

    architecture: Architecture
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    activation: Literal["silu"]
    rms_norm_eps: float
    max_positions: int
    tied_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    lm_head_bias: bool
    qk_norm: bool
    rotary: Rotary
    moe: Moe | None
    dtype: DType
    quantization: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` routes to experts; the others have one dense MLP."""
        return self.moe is not None and layer in self.moe.sparse_layers

    @property
    def sparse_layer_count(self) -> int:
        return len(self.moe.sparse_layers) if self.moe else 0

    @property
    def dense_layer_count(self) -> int:
        return self.layers - self.sparse_layer_count

"""Every tensor of a model as a row of a table: name, shape, how many there are, how it is cut over cards.

Parameter counts, weight bytes per card and what is replicated all follow from this one table. Names are those of the
checkpoint in transformers' layout of one tensor per projection and expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hpu_engine.planning.model.description import ModelDescription


class Part(StrEnum):
    EMBEDDING = "embedding"
    ATTENTION = "attention"
    DENSE_MLP = "dense MLP"
    ROUTER = "router"
    EXPERTS = "routed experts"
    SHARED_EXPERTS = "shared experts"
    NORMS = "norms"
    HEAD = "head"


class Cut(StrEnum):
    """How tensor parallelism cuts a tensor. Routed experts are given out whole instead under expert parallelism."""

    NONE = "replicated"
    ROWS = "output rows"
    COLUMNS = "input columns"
    KV_HEADS = "KV heads"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """`copies` tensors of one `shape` [out, in] or [out]; `name` has `{layer}` and `{expert}` where they differ.

    `wide`: kept in float32 whatever the model's dtype. `projection`: a matrix that fp8 quantises.
    """

    name: str
    part: Part
    shape: tuple[int, ...]
    copies: int
    cut: Cut
    wide: bool = False
    projection: bool = False

    @property
    def elements(self) -> int:
        """Elements of all copies together."""
        product = self.copies
        for size in self.shape:
            product *= size
        return product

    @property
    def routed(self) -> bool:
        return self.part is Part.EXPERTS


def tensor_table(model: ModelDescription) -> tuple[TensorRow, ...]:
    """The rows of `model`, embedding first."""
    return tuple(_rows(model))


def parameter_count(model: ModelDescription) -> int:
    """Elements of every tensor; tied embeddings count once. Equals `sum(p.numel())` of transformers' model."""
    return sum(row.elements for row in tensor_table(model))


def active_parameter_count(model: ModelDescription) -> int:
    """Elements that one token is multiplied with: its top-k experts, every other matrix and the head."""
    active = 0
    for row in tensor_table(model):
        if row.part is Part.EMBEDDING:
            active += row.elements if model.tied_embeddings else 0
        elif row.routed and model.moe is not None:
            active += row.elements * model.moe.top_k // model.moe.experts
        else:
            active += row.elements
    return active


def _rows(model: ModelDescription) -> Iterator[TensorRow]:
    yield TensorRow("model.embed_tokens.weight", Part.EMBEDDING, (model.vocab, model.hidden), 1, Cut.ROWS)
    yield from _attention(model)
    norm = (model.hidden,)
    yield TensorRow("model.layers.{layer}.input_layernorm.weight", Part.NORMS, norm, model.layers, Cut.NONE)
    yield TensorRow("model.layers.{layer}.post_attention_layernorm.weight", Part.NORMS, norm, model.layers, Cut.NONE)
    yield TensorRow("model.norm.weight", Part.NORMS, norm, 1, Cut.NONE)
    if model.dense_layer_count:
        yield from _mlp(
            model, "mlp", Part.DENSE_MLP, model.intermediate, model.dense_layer_count, biased=model.mlp_bias
        )
    if model.moe is not None:
        yield from _moe(model)
    if not model.tied_embeddings:
        yield TensorRow("lm_head.weight", Part.HEAD, (model.vocab, model.hidden), 1, Cut.ROWS)
    if model.lm_head_bias:
        yield TensorRow("lm_head.bias", Part.HEAD, (model.vocab,), 1, Cut.ROWS)


def _attention(model: ModelDescription) -> Iterator[TensorRow]:
    prefix = "model.layers.{layer}.self_attn."
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    for name, width, cut in (("q", queries, Cut.ROWS), ("k", keys, Cut.KV_HEADS), ("v", keys, Cut.KV_HEADS)):
        shape = (width, model.hidden)
        yield TensorRow(f"{prefix}{name}_proj.weight", Part.ATTENTION, shape, model.layers, cut, projection=True)
        if model.attention_bias:
            yield TensorRow(f"{prefix}{name}_proj.bias", Part.ATTENTION, (width,), model.layers, cut)
    output = (model.hidden, queries)
    yield TensorRow(f"{prefix}o_proj.weight", Part.ATTENTION, output, model.layers, Cut.COLUMNS, projection=True)
    if model.attention_output_bias:
        yield TensorRow(f"{prefix}o_proj.bias", Part.ATTENTION, (model.hidden,), model.layers, Cut.NONE)
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield TensorRow(f"{prefix}{name}.weight", Part.NORMS, (model.head_dim,), model.layers, Cut.NONE)


def _mlp(
    model: ModelDescription, name: str, part: Part, width: int, copies: int, *, biased: bool
) -> Iterator[TensorRow]:
    prefix = f"model.layers.{{layer}}.{name}."
    for projection in ("gate_proj", "up_proj"):
        shape = (width, model.hidden)
        yield TensorRow(f"{prefix}{projection}.weight", part, shape, copies, Cut.ROWS, projection=True)
        if biased:
            yield TensorRow(f"{prefix}{projection}.bias", part, (width,), copies, Cut.ROWS)
    yield TensorRow(f"{prefix}down_proj.weight", part, (model.hidden, width), copies, Cut.COLUMNS, projection=True)
    if biased:
        yield TensorRow(f"{prefix}down_proj.bias", part, (model.hidden,), copies, Cut.NONE)


def _moe(model: ModelDescription) -> Iterator[TensorRow]:
    moe = model.moe
    assert moe is not None
    layers = model.sparse_layer_count
    wide = moe.router.logits_dtype == "float32"
    gate = (moe.experts, model.hidden)
    yield TensorRow("model.layers.{layer}.mlp.gate.weight", Part.ROUTER, gate, layers, Cut.NONE, wide=wide)
    if moe.router.correction_bias:
        name = "model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"
        yield TensorRow(name, Part.ROUTER, (1, moe.experts), layers, Cut.NONE, wide=True)
    # transformers gives a bias to shared experts, never to routed ones (`Ernie4_5_MoeExperts`).
    yield from _mlp(model, "mlp.experts.{expert}", Part.EXPERTS, moe.intermediate, layers * moe.experts, biased=False)
    if moe.shared_experts:
        yield from _mlp(
            model,
            "mlp.shared_experts",
            Part.SHARED_EXPERTS,
            moe.shared_intermediate,
            layers,
            biased=model.mlp_bias,
        )

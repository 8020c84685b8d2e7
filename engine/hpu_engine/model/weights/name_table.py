"""Which tensor of a checkpoint is which part of which parameter: one declarative table, expanded by a description.

A parameter is what the model computes with; it may be several checkpoint tensors stacked along their first axis (q, k
and v; gate and up). Shapes, cuts and types come from planning's table of tensors, so that what is planned is what is
loaded; a `Name` here adds where a tensor goes and what else a family calls it. The order of planning's rows is the
order of a parameter's rows. A checkpoint must have every name of the expanded table, and no other.

Scales of activations are in the table as well, for ERNIE checkpoints that declare a quantisation: one number each.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hpu_engine.model.weights.placement import Placement, Region
from hpu_engine.planning.model.description import Architecture, ModelDescription
from hpu_engine.planning.model.parameters import Cut, Part, TensorRow, tensor_table

Shape = tuple[int, ...]


class Transform(StrEnum):
    """What is done to a stored tensor on its way into a parameter."""

    NONE = "as stored"
    FLATTEN = "one axis"


class Scale(StrEnum):
    """What the number of a float8 activation scale is."""

    AMAX = "amax"
    QUOTIENT = "amax / largest"


@dataclass(frozen=True, slots=True)
class Name:
    """`tensor` is planning's name and, where `stored` has none for the family, the checkpoint's as well.

    `scale`: not a weight but an activation scale, unknown to planning; `part` says which layers have it.
    """

    tensor: str
    parameter: str
    transform: Transform = Transform.NONE
    stored: Mapping[Architecture, str] = field(default_factory=dict)
    scale: Scale | None = None
    part: Part | None = None

    def pattern(self, model: ModelDescription) -> str:
        return self.stored.get(model.architecture, self.tensor)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Where one checkpoint tensor goes: `region` of it into rows `row :` of `parameter`; None: another worker's."""

    parameter: str
    row: int
    shape: Shape
    region: Region | None
    transform: Transform
    cut: Cut
    expert: int | None
    scale: Scale | None = None

    @property
    def held_shape(self) -> Shape:
        """Of what is read, as stored."""
        assert self.region is not None
        return tuple(stop - start for start, stop in self.region)


@dataclass(frozen=True, slots=True)
class Parameter:
    """`shape` as held by this worker; `wide`: float32 whatever the model's type; `parts`: how many tensors fill it."""

    shape: Shape
    wide: bool
    parts: int


@dataclass(frozen=True, slots=True)
class NameTable:
    """`parts` by checkpoint name, of the whole model; `parameters` of this worker; `ignored` patterns."""

    parts: dict[str, StoredPart]
    parameters: dict[str, Parameter]
    ignored: tuple[str, ...]

    def is_ignored(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


_L = "model.layers.{layer}."
_MIXTRAL = "model.layers.{layer}.block_sparse_moe."


def _linear(tensor: str, parameter: str) -> tuple[Name, Name]:
    return Name(f"{tensor}.weight", parameter), Name(f"{tensor}.bias", f"{parameter}_bias")


def _scale(tensor: str, parameter: str, scale: Scale, part: Part) -> Name:
    return Name(
        f"ernie.layers.{{layer}}.{tensor}.activation_scale", f"layers.{{layer}}.{parameter}", scale=scale, part=part
    )


NAMES: tuple[Name, ...] = (
    Name("model.embed_tokens.weight", "embedding"),
    Name(_L + "input_layernorm.weight", "layers.{layer}.attention_norm"),
    *_linear(_L + "self_attn.q_proj", "layers.{layer}.qkv"),
    *_linear(_L + "self_attn.k_proj", "layers.{layer}.qkv"),
    *_linear(_L + "self_attn.v_proj", "layers.{layer}.qkv"),
    *_linear(_L + "self_attn.o_proj", "layers.{layer}.output"),
    Name(_L + "self_attn.q_norm.weight", "layers.{layer}.q_norm"),
    Name(_L + "self_attn.k_norm.weight", "layers.{layer}.k_norm"),
    Name(_L + "post_attention_layernorm.weight", "layers.{layer}.mlp_norm"),
    *_linear(_L + "mlp.gate_proj", "layers.{layer}.gate_up"),
    *_linear(_L + "mlp.up_proj", "layers.{layer}.gate_up"),
    *_linear(_L + "mlp.down_proj", "layers.{layer}.down"),
    Name(
        _L + "mlp.gate.weight",
        "layers.{layer}.router",
        stored={Architecture.MIXTRAL: _MIXTRAL + "gate.weight"},
    ),
    Name(
        _L + "mlp.moe_statics.e_score_correction_bias",
        "layers.{layer}.router_correction",
        transform=Transform.FLATTEN,
    ),
    Name(
        _L + "mlp.experts.{expert}.gate_proj.weight",
        "layers.{layer}.experts.{expert}.gate_up",
        stored={Architecture.MIXTRAL: _MIXTRAL + "experts.{expert}.w1.weight"},
    ),
    Name(
        _L + "mlp.experts.{expert}.up_proj.weight",
        "layers.{layer}.experts.{expert}.gate_up",
        stored={Architecture.MIXTRAL: _MIXTRAL + "experts.{expert}.w3.weight"},
    ),
    Name(
        _L + "mlp.experts.{expert}.down_proj.weight",
        "layers.{layer}.experts.{expert}.down",
        stored={Architecture.MIXTRAL: _MIXTRAL + "experts.{expert}.w2.weight"},
    ),
    *_linear(_L + "mlp.shared_experts.gate_proj", "layers.{layer}.shared.gate_up"),
    *_linear(_L + "mlp.shared_experts.up_proj", "layers.{layer}.shared.gate_up"),
    *_linear(_L + "mlp.shared_experts.down_proj", "layers.{layer}.shared.down"),
    Name("model.norm.weight", "final_norm"),
    *_linear("lm_head", "lm_head"),
    _scale("self_attn.qkv_proj", "qkv.act_scale", Scale.AMAX, Part.ATTENTION),
    _scale("self_attn.o_proj", "output.act_scale", Scale.AMAX, Part.ATTENTION),
    _scale("self_attn.cachek_matmul", "cache_k_scale", Scale.AMAX, Part.ATTENTION),
    _scale("self_attn.cachev_matmul", "cache_v_scale", Scale.AMAX, Part.ATTENTION),
    _scale("self_attn.q_matmul", "q_scale", Scale.AMAX, Part.ATTENTION),
    _scale("self_attn.s_matmul", "s_scale", Scale.AMAX, Part.ATTENTION),
    _scale("mlp.up_gate_proj", "gate_up.act_scale", Scale.QUOTIENT, Part.DENSE_MLP),
    _scale("mlp.down_proj", "down.act_scale", Scale.QUOTIENT, Part.DENSE_MLP),
    _scale("mlp.shared_experts.up_gate_proj", "shared.gate_up.act_scale", Scale.QUOTIENT, Part.SHARED_EXPERTS),
    _scale("mlp.shared_experts.down_proj", "shared.down.act_scale", Scale.QUOTIENT, Part.SHARED_EXPERTS),
    _scale("mlp.experts.{expert}.up_gate_proj", "experts.gate_up.in_scale", Scale.QUOTIENT, Part.ROUTER),
    _scale("mlp.experts.{expert}.down_proj", "experts.down.in_scale", Scale.QUOTIENT, Part.EXPERTS),
)
"""Every tensor of every family. Every rank needs the up_gate scales of all experts, and the down scales of its own."""

SCALE_NAMES = tuple(name for name in NAMES if name.scale is not None)

IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
"""Buffers that old checkpoints carry and that follow from the configuration."""

IGNORED_BY_FAMILY: Mapping[Architecture, tuple[str, ...]] = {Architecture.ERNIE_MOE: ("model.mtp_*",)}
"""Layers that predict several tokens ahead; transformers leaves them out as well."""


def expand(model: ModelDescription, placement: Placement | None = None) -> NameTable:
    """The table of one model on one worker. A tied checkpoint may repeat its embedding as the output matrix; that copy
    is ignored. Raises PlanError where the experts cannot be given out evenly.
    """
    place = placement or Placement()
    names = {name.tensor: name for name in NAMES}
    rows = [(row, names[row.name]) for row in tensor_table(model)]
    if model.quantization is not None and model.architecture in (Architecture.ERNIE, Architecture.ERNIE_MOE):
        rows += [(row, name) for name in SCALE_NAMES if (row := _scale_row(model, name)).copies]
    parts: dict[str, StoredPart] = {}
    parameters: dict[str, Parameter] = {}
    for row, name in rows:
        for layer, expert in _instances(model, row):
            parameter = name.parameter.format(layer=layer, expert=expert)
            region = place.region(model, row, expert)
            so_far = parameters.get(parameter)
            stored = name.pattern(model).format(layer=layer, expert=expert)
            first = so_far.shape[0] if so_far and region else 0
            parts[stored] = StoredPart(parameter, first, row.shape, region, name.transform, row.cut, expert, name.scale)
            if region is not None:
                parameters[parameter] = _grown(so_far, parts[stored], row)
    ignored = IGNORED + IGNORED_BY_FAMILY.get(model.architecture, ())
    return NameTable(parts, parameters, (*ignored, "lm_head.weight") if model.tied_embeddings else ignored)


def _grown(parameter: Parameter | None, part: StoredPart, row: TensorRow) -> Parameter:
    shape = part.held_shape if part.transform is Transform.NONE else (row.elements // row.copies,)
    if parameter is None:
        return Parameter(shape, row.wide, 1)
    assert parameter.shape[1:] == shape[1:], f"{part.parameter} is stacked from unequal widths"
    return Parameter((parameter.shape[0] + shape[0], *shape[1:]), row.wide, parameter.parts + 1)


def _scale_row(model: ModelDescription, name: Name) -> TensorRow:
    """One number per layer, or per layer and expert; replicated where its part is not given out to ranks."""
    assert name.part is not None
    layers = {
        Part.ATTENTION: model.layers,
        Part.DENSE_MLP: model.dense_layer_count,
        Part.SHARED_EXPERTS: model.sparse_layer_count if model.moe and model.moe.shared_experts else 0,
    }
    copies = layers.get(name.part, model.sparse_layer_count)
    return TensorRow(name.tensor, name.part, (1,), copies, Cut.NONE, wide=True)


def _instances(model: ModelDescription, row: TensorRow) -> Iterator[tuple[int | None, int | None]]:
    """(layer, expert) of every tensor of a row; None where the name has none."""
    if "{layer}" not in row.name:
        yield None, None
        return
    for layer in range(model.layers):
        sparse = model.is_sparse(layer)
        if row.part is Part.DENSE_MLP and sparse:
            continue
        if row.part in (Part.ROUTER, Part.EXPERTS, Part.SHARED_EXPERTS) and not sparse:
            continue
        if "{expert}" in row.name:
            assert model.moe is not None
            yield from ((layer, expert) for expert in range(model.moe.experts))
        else:
            yield layer, None


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that looks most like `name`: what a mistyped key was probably meant to be."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return close[0] if close else None

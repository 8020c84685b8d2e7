"""Which tensor of a checkpoint is which part of which parameter: one declarative table, expanded by a description.

A parameter is what the model computes with; it may be several checkpoint tensors stacked along their first axis (q, k
and v; gate and up). Each `Entry` is one checkpoint pattern, the parameter it lands in, and its shape. The order of the
entries of one parameter is the order of its rows. A checkpoint must have every name of the expanded table, and no
other.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hpu_engine.planning.model import ModelDescription

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """`{layer}` in `pattern` and `parameter` is each layer that `present` admits; None stands for "no layer"."""

    pattern: str
    parameter: str
    shape: Callable[[ModelDescription], Shape]
    present: Callable[[ModelDescription, int | None], bool] = lambda _description, _layer: True

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.pattern


@dataclass(frozen=True, slots=True)
class Part:
    """Where one checkpoint tensor goes: rows `row : row + shape[0]` of `parameter`."""

    parameter: str
    row: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class NameTable:
    """`parts` by checkpoint name, `parameters` with their whole shapes, `ignored` patterns."""

    parts: dict[str, Part]
    parameters: dict[str, Shape]
    ignored: tuple[str, ...]

    def is_ignored(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


def _q(d: ModelDescription) -> Shape:
    return (d.heads * d.head_dim, d.hidden)


def _kv(d: ModelDescription) -> Shape:
    return (d.kv_heads * d.head_dim, d.hidden)


def _attention_bias(d: ModelDescription, _layer: int | None) -> bool:
    return d.attention_bias


def _dense(d: ModelDescription, layer: int | None) -> bool:
    return layer is not None and not d.is_sparse(layer)


def _dense_bias(d: ModelDescription, layer: int | None) -> bool:
    return d.mlp_bias and _dense(d, layer)


def _qk_norm(d: ModelDescription, _layer: int | None) -> bool:
    return d.qk_norm


_LAYER = "model.layers.{layer}."

DECODER_ENTRIES: tuple[Entry, ...] = (
    Entry("model.embed_tokens.weight", "embedding", lambda d: (d.vocab, d.hidden)),
    Entry(_LAYER + "input_layernorm.weight", "layers.{layer}.attention_norm", lambda d: (d.hidden,)),
    Entry(_LAYER + "self_attn.q_proj.weight", "layers.{layer}.qkv", _q),
    Entry(_LAYER + "self_attn.k_proj.weight", "layers.{layer}.qkv", _kv),
    Entry(_LAYER + "self_attn.v_proj.weight", "layers.{layer}.qkv", _kv),
    Entry(_LAYER + "self_attn.q_proj.bias", "layers.{layer}.qkv_bias", lambda d: _q(d)[:1], _attention_bias),
    Entry(_LAYER + "self_attn.k_proj.bias", "layers.{layer}.qkv_bias", lambda d: _kv(d)[:1], _attention_bias),
    Entry(_LAYER + "self_attn.v_proj.bias", "layers.{layer}.qkv_bias", lambda d: _kv(d)[:1], _attention_bias),
    Entry(_LAYER + "self_attn.q_norm.weight", "layers.{layer}.q_norm", lambda d: (d.head_dim,), _qk_norm),
    Entry(_LAYER + "self_attn.k_norm.weight", "layers.{layer}.k_norm", lambda d: (d.head_dim,), _qk_norm),
    Entry(_LAYER + "self_attn.o_proj.weight", "layers.{layer}.output", lambda d: _q(d)[::-1]),
    Entry(
        _LAYER + "self_attn.o_proj.bias",
        "layers.{layer}.output_bias",
        lambda d: (d.hidden,),
        lambda d, _layer: d.attention_output_bias,
    ),
    Entry(_LAYER + "post_attention_layernorm.weight", "layers.{layer}.mlp_norm", lambda d: (d.hidden,)),
    Entry(_LAYER + "mlp.gate_proj.weight", "layers.{layer}.gate_up", lambda d: (d.intermediate, d.hidden), _dense),
    Entry(_LAYER + "mlp.up_proj.weight", "layers.{layer}.gate_up", lambda d: (d.intermediate, d.hidden), _dense),
    Entry(_LAYER + "mlp.down_proj.weight", "layers.{layer}.down", lambda d: (d.hidden, d.intermediate), _dense),
    Entry(_LAYER + "mlp.gate_proj.bias", "layers.{layer}.gate_up_bias", lambda d: (d.intermediate,), _dense_bias),
    Entry(_LAYER + "mlp.up_proj.bias", "layers.{layer}.gate_up_bias", lambda d: (d.intermediate,), _dense_bias),
    Entry(_LAYER + "mlp.down_proj.bias", "layers.{layer}.down_bias", lambda d: (d.hidden,), _dense_bias),
    Entry("model.norm.weight", "final_norm", lambda d: (d.hidden,)),
    Entry("lm_head.weight", "lm_head", lambda d: (d.vocab, d.hidden), lambda d, _layer: not d.tied_embeddings),
    Entry("lm_head.bias", "lm_head_bias", lambda d: (d.vocab,), lambda d, _layer: d.lm_head_bias),
)
"""The parts every supported decoder shares."""

IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
"""Buffers that old checkpoints carry and that follow from the configuration."""


def expand(description: ModelDescription, entries: Iterable[Entry] = DECODER_ENTRIES) -> NameTable:
    """The table of one model. A tied checkpoint may repeat its embedding as the output matrix; that copy is ignored."""
    parts: dict[str, Part] = {}
    parameters: dict[str, Shape] = {}
    for name, parameter, shape in _names(description, entries):
        so_far = parameters.get(parameter)
        row = so_far[0] if so_far else 0
        assert so_far is None or so_far[1:] == shape[1:], f"{parameter} is stacked from unequal widths"
        parts[name] = Part(parameter, row, shape)
        parameters[parameter] = (row + shape[0], *shape[1:])
    ignored = (*IGNORED, "lm_head.weight") if description.tied_embeddings else IGNORED
    return NameTable(parts, parameters, ignored)


def _names(d: ModelDescription, entries: Iterable[Entry]) -> Iterator[tuple[str, str, Shape]]:
    for entry in entries:
        layers: Iterable[int | None] = range(d.layers) if entry.per_layer else (None,)
        for layer in layers:
            if entry.present(d, layer):
                yield entry.pattern.format(layer=layer), entry.parameter.format(layer=layer), entry.shape(d)


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that looks most like `name`: what a mistyped key was probably meant to be."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return close[0] if close else None

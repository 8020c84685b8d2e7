"""Builds a transformer from a checkpoint directory: parameters stream in, each becomes a device linear on arrival."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hpu_engine.device.base import Device, Linear
from hpu_engine.model.rotary import RotaryTable
from hpu_engine.model.transformer import DenseMlp, Layer, Transformer
from hpu_engine.model.weights.loading import OnBytes, load_parameters
from hpu_engine.model.weights.name_table import expand
from hpu_engine.planning.model import ModelDescription

_BIAS = "_bias"


@dataclass(slots=True)
class _Parameters:
    """What has arrived. A linear's bias may come before or after its weight; it is built when both are there."""

    device: Device
    biased: frozenset[str]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    linears: dict[str, Linear] = field(default_factory=dict)

    def take(self, name: str, value: Tensor) -> None:
        owner = name.removesuffix(_BIAS)
        self.tensors[name] = value
        is_plain = (value.dim() == 1 and not name.endswith(_BIAS)) or name == "embedding"
        if is_plain or owner not in self.tensors or (owner in self.biased and owner + _BIAS not in self.tensors):
            return
        weight, bias = self.tensors.pop(owner), self.tensors.pop(owner + _BIAS, None)
        self.linears[owner] = self.device.linear(weight, bias)


def build_transformer(
    directory: Path,
    description: ModelDescription,
    device: Device,
    *,
    dtype: torch.dtype,
    max_len: int,
    on_bytes: OnBytes,
) -> Transformer:
    """Loads the checkpoint for sequences of up to `max_len` tokens. Raises WeightsError."""
    table = expand(description)
    biased = frozenset(name.removesuffix(_BIAS) for name in table.parameters if name.endswith(_BIAS))
    parameters = _Parameters(device, biased)
    for name, value in load_parameters(directory, table, dtype, on_bytes):
        parameters.take(name, value)
    embedding = parameters.tensors["embedding"]
    if description.tied_embeddings:
        parameters.linears["lm_head"] = device.linear(embedding, parameters.tensors.get("lm_head_bias"))
    return Transformer(
        description=description,
        dtype=dtype,
        embedding=_narrow(embedding, description),
        layers=tuple(_layer(index, parameters) for index in range(description.layers)),
        final_norm=parameters.tensors["final_norm"],
        lm_head=parameters.linears["lm_head"],
        rotary=RotaryTable(description.rotary, description.head_dim, max_len, dtype),
    )


def _layer(index: int, parameters: _Parameters) -> Layer:
    prefix = f"layers.{index}."
    tensors, linears = parameters.tensors, parameters.linears
    return Layer(
        attention_norm=tensors[prefix + "attention_norm"],
        qkv=linears[prefix + "qkv"],
        q_norm=tensors.get(prefix + "q_norm"),
        k_norm=tensors.get(prefix + "k_norm"),
        output=linears[prefix + "output"],
        mlp_norm=tensors[prefix + "mlp_norm"],
        mlp=DenseMlp(linears[prefix + "gate_up"], linears[prefix + "down"]),
    )


def _narrow(embedding: Tensor, description: ModelDescription) -> Tensor:
    """The look-up table in the checkpoint's own type: as exact, and half the memory where it was widened."""
    own = getattr(torch, description.dtype)
    narrow = embedding.to(own)
    return (
        narrow
        if own.itemsize < embedding.dtype.itemsize and torch.equal(narrow.to(embedding.dtype), embedding)
        else embedding
    )

"""Builds one worker's transformer from a checkpoint: parameters stream in, each becomes a device linear on arrival."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hpu_engine.device.base import AttentionShape, Device, HeadNorms, Linear, LinearWeights
from hpu_engine.group.collectives import ALONE, Collectives, Groups
from hpu_engine.model.moe.combiner import AllReduce, Combiner, ReduceScatter, SingleRank
from hpu_engine.model.moe.dispatcher import Dispatcher, GatherDispatch, NoDispatch
from hpu_engine.model.moe.experts import WindowExperts
from hpu_engine.model.moe.layer import MoeLayer, SharedExperts
from hpu_engine.model.moe.router import Router, RoutingRule
from hpu_engine.model.rotary import RotaryTable
from hpu_engine.model.sharded import Embedding, gathered, reduced
from hpu_engine.model.transformer import DenseMlp, FusedMlp, Layer, Mlp, Transformer
from hpu_engine.model.weights.loading import OnBytes, load_parameters
from hpu_engine.model.weights.name_table import NameTable, expand
from hpu_engine.model.weights.placement import Placement
from hpu_engine.planning.model.description import ModelDescription

_BIAS = "_bias"
_ROUTER = ".router"
"""Its scores are compared: what rounds them to other experts changes more than digits."""

_SUMMED = ("output", "down")
"""Ends of the names of linears whose input is cut: their bias counts once, on the first rank."""


@dataclass(slots=True)
class _Parameters:
    """What has arrived. A linear's bias may come before or after its weight; it is built when both are there."""

    device: Device
    biased: frozenset[str]
    drops_summed_bias: bool
    tensors: dict[str, Tensor] = field(default_factory=dict)
    linears: dict[str, Linear] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def take(self, name: str, value: Tensor) -> None:
        owner = name.removesuffix(_BIAS)
        if name == "embedding" or (value.dim() == 1 and owner == name):
            self.tensors[name] = value.to(self.device.where)
            return
        self.tensors[name] = value
        if owner not in self.tensors or (owner in self.biased and owner + _BIAS not in self.tensors):
            return
        weight, bias = self.tensors.pop(owner), self.tensors.pop(owner + _BIAS, None)
        if self.drops_summed_bias and owner.endswith(_SUMMED):
            bias = None
        self.linears[owner] = self.device.linear(LinearWeights(weight, bias, rounds=not owner.endswith(_ROUTER)))
        self.dtypes[owner] = weight.dtype


def build_transformer(
    directory: Path,
    description: ModelDescription,
    device: Device,
    *,
    dtype: torch.dtype,
    max_len: int,
    on_bytes: OnBytes,
    placement: Placement | None = None,
    groups: Groups = ALONE,
) -> Transformer:
    """Loads this worker's part for sequences of up to `max_len` tokens. Raises WeightsError."""
    place = placement or Placement()
    table = expand(description, place)
    arriving = load_parameters(directory, table, dtype, on_bytes)
    return assemble(arriving, table, description, device, dtype=dtype, max_len=max_len, placement=place, groups=groups)


def assemble(
    arriving: Iterable[tuple[str, Tensor]],
    table: NameTable,
    description: ModelDescription,
    device: Device,
    *,
    dtype: torch.dtype,
    max_len: int,
    placement: Placement,
    groups: Groups,
) -> Transformer:
    """The transformer of one worker from its parameters, in whatever order they arrive."""
    biased = frozenset(name.removesuffix(_BIAS) for name in table.parameters if name.endswith(_BIAS))
    parameters = _Parameters(device, biased, drops_summed_bias=placement.tensor_rank > 0)
    for name, value in arriving:
        parameters.take(name, value)
    embedding = parameters.tensors["embedding"]
    if description.tied_embeddings:
        parameters.linears["lm_head"] = device.linear(LinearWeights(embedding, parameters.tensors.get("lm_head_bias")))
    first_row, _ = placement.vocab_rows(description)
    worker = _Worker(description, device, placement, groups, parameters)
    heads, kv_heads, head_dim = placement.heads(description), placement.kv_heads(description), description.head_dim
    return Transformer(
        description=description,
        attention_shape=AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5),
        dtype=dtype,
        embedding=Embedding(_narrow(embedding, description), dtype, first_row, groups.tensor),
        layers=tuple(worker.layer(index) for index in range(description.layers)),
        final_norm=parameters.tensors["final_norm"],
        lm_head=gathered(parameters.linears["lm_head"], groups.tensor),
        rotary=RotaryTable(description.rotary, head_dim, max_len, dtype, device.where),
        device=device,
    )


@dataclass(frozen=True, slots=True)
class _Worker:
    """Layers of one worker from its parameters."""

    description: ModelDescription
    device: Device
    placement: Placement
    groups: Groups
    parameters: _Parameters

    def layer(self, index: int) -> Layer:
        prefix = f"layers.{index}."
        tensors, linears = self.parameters.tensors, self.parameters.linears
        return Layer(
            attention_norm=tensors[prefix + "attention_norm"],
            qkv=linears[prefix + "qkv"],
            head_norms=self._head_norms(prefix),
            output=reduced(linears[prefix + "output"], self.groups.tensor),
            mlp_norm=tensors[prefix + "mlp_norm"],
            mlp=self._moe(prefix) if self.description.is_sparse(index) else self._dense(prefix),
        )

    def _head_norms(self, prefix: str) -> HeadNorms | None:
        q, k = (self.parameters.tensors.get(prefix + name) for name in ("q_norm", "k_norm"))
        return None if q is None or k is None else HeadNorms(q, k, self.description.rms_norm_eps)

    def _dense(self, prefix: str) -> Mlp:
        linears = self.parameters.linears
        return self._mlp(linears[prefix + "gate_up"], linears[prefix + "down"], self.groups.tensor)

    def _mlp(self, gate_up: Linear, down: Linear, collectives: Collectives) -> Mlp:
        """Its partial sums are added up over `collectives`, whether one kernel makes them or two."""
        ops = self.device.ops
        fused = ops.mlp(gate_up, down)
        if fused is None:
            return DenseMlp(gate_up, reduced(down, collectives), ops)
        return FusedMlp(reduced(fused, collectives))

    def _moe(self, prefix: str) -> Mlp:
        moe = self.description.moe
        assert moe is not None
        tensors = self.parameters.tensors
        window = self.placement.experts(self.description)
        linears = self.parameters.linears
        names = [f"{prefix}experts.{expert}." for expert in range(window.first, window.last + 1)]
        kernel = self.device.experts([(linears[name + "gate_up"], linears[name + "down"]) for name in names])
        dispatcher, combiner = self._exchange()
        return MoeLayer(
            router=Router(
                RoutingRule.of(moe),
                linears[prefix + "router"],
                self.parameters.dtypes[prefix + "router"],
                tensors.get(prefix + "router_correction"),
            ),
            dispatcher=dispatcher,
            experts=WindowExperts(window, kernel),
            combiner=combiner,
            shared=self._shared(prefix) if moe.shared_experts else None,
        )

    def _exchange(self) -> tuple[Dispatcher, Combiner]:
        """Ranks with tokens of their own gather and scatter; ranks with the same tokens only add up."""
        if self.groups.data.size > 1:
            return GatherDispatch(self.groups.data), ReduceScatter(self.groups.data, self.groups.tensor)
        if self.groups.tensor.size > 1:
            return NoDispatch(), AllReduce(self.groups.tensor)
        return NoDispatch(), SingleRank()

    def _shared(self, prefix: str) -> SharedExperts:
        """Cut over the tensor ranks: where those alone are added up, its sum rides along with the routed one."""
        linears = self.parameters.linears
        gate_up, down = linears[prefix + "shared.gate_up"], linears[prefix + "shared.down"]
        if self.groups.data.size > 1:
            return SharedExperts(self._mlp(gate_up, down, self.groups.tensor), is_partial=False)
        return SharedExperts(self._mlp(gate_up, down, ALONE.tensor), is_partial=self.groups.tensor.size > 1)


def _narrow(embedding: Tensor, description: ModelDescription) -> Tensor:
    """The look-up table in the checkpoint's own type: as exact, and half the memory where it was widened."""
    own = getattr(torch, description.dtype)
    narrow = embedding.to(own)
    return (
        narrow
        if own.itemsize < embedding.dtype.itemsize and torch.equal(narrow.to(embedding.dtype), embedding)
        else embedding
    )

"""The seam between the model and a device: every type that both sides know. The model never asks which device it has.

A device decides where tensors are, in which form it keeps weights and the KV cache, which kernels compute, and where a
graph may be cut. The model decides what is computed, in which order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hpu_engine.step.batch import Batch
    from hpu_engine.step.padded_batch import PaddedBatch

HOST = torch.device("cpu")
"""Where files are read to, and where tokens are chosen from finished logits."""

Result = TypeVar("Result")

Gate = Callable[[Tensor], Tensor]
"""[rows, 2 * width], gate first, to silu(gate) * up [rows, width]."""

ExpertKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states [rows, hidden], indices of experts [rows, top_k] (other numbers: experts elsewhere) and their weights
[rows, top_k], to float32 sums [rows, hidden].
"""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A linear as it was loaded: `weight` [out, in], `bias` [out]. `rounds`: activations may be rounded to the type of
    the device's operands.
    """

    weight: Tensor
    bias: Tensor | None = None
    rounds: bool = True


class Linear(Protocol):
    """A linear in the form that its device keeps: data that this device knows how to read, stack or wrap."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[rows, in] to [rows, out], bias included."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of one worker. `scale` multiplies the scores (1 / sqrt(head_dim))."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms of queries and keys, where a family has them."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Turn:
    """cos and sin [tokens, 1, head_dim] of a step's positions, and how the pairs of a head lie."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


class LayerCache(Protocol):
    """Keys and values of one layer, in a layout that only the device knows."""

    @property
    def block_size(self) -> int: ...


class LayerOps(Protocol):
    """What a layer does beside linears and attention. Each works row by row: a row's bits depend on that row alone."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`x` + `delta` [rows, width] (`x` itself without one), and its root mean square norm times `weight` in the
        type of `weight`. The sum may be kept in a wider type.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * width], gate first, to silu(gate) * up [rows, width]."""

    def rotate(self, qkv: Tensor, heads: int, norms: HeadNorms | None, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """`qkv` [tokens, heads + 2 * kv_heads, head_dim] to queries and keys, normed and turned, and values."""

    def mlp(self, gate_up: Linear, down: Linear) -> Linear | None:
        """A gated MLP of two of the device's linears as one kernel. None: it is done by its parts."""


class StepAttention(Protocol):
    """Attention of one step, prepared once: `write` a layer's new keys and values, then `attend`, layer by layer.

    `cache` is the layer's, made by the same device.
    """

    def write(self, cache: Any, keys: Tensor, values: Tensor) -> None:
        """`keys`, `values` [tokens, kv_heads, head_dim] of the whole batch."""

    def attend(self, q: Tensor, cache: Any) -> Tensor:
        """`q` [tokens, heads, head_dim] to [tokens, heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class WarmUpShape:
    """One step to run before serving: `chunks` rows of `chunk_len` new tokens, `singles` rows of one, each with a
    context of `context_len` tokens.
    """

    chunks: int
    chunk_len: int
    singles: int
    context_len: int

    @property
    def num_tokens(self) -> int:
        return self.chunks * self.chunk_len + self.singles

    def __str__(self) -> str:
        return f"{self.chunks}x{self.chunk_len}+{self.singles}@{self.context_len}"


class Device(ABC):
    name: str
    where: torch.device
    """Where every tensor of the model and of a step is."""

    @property
    @abstractmethod
    def ops(self) -> LayerOps:
        """The device's kernels for what a layer does between its linears."""

    def put(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Whole numbers of the host as an int64 tensor of the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.where)

    @abstractmethod
    def linear(self, weights: LinearWeights) -> Linear:
        """The fastest form of `weights`, which the device may keep, repack or drop."""

    @abstractmethod
    def experts(self, experts: Sequence[tuple[Linear, Linear]]) -> ExpertKernel:
        """One kernel for experts of one window, each a gate-and-up and a down linear of this device."""

    @abstractmethod
    def new_kv_cache(
        self, *, layers: int, pages: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> Sequence[LayerCache]:
        """The cache of one worker, empty: `pages` blocks of every layer, scratch included."""

    @abstractmethod
    def attention(
        self, shape: AttentionShape, batch: Batch | PaddedBatch, cache: LayerCache, dtype: torch.dtype
    ) -> StepAttention:
        """The attention of one step in activations of `dtype`; `cache` is that of any layer."""

    def segment(self, name: str, work: Callable[..., Result], *inputs: Tensor) -> Result:
        """`work(*inputs)`: the part of a step called `name`, between two calls of attention. A device that compiles
        graphs cuts them here and nowhere else; the same name with inputs of the same shapes is the same graph.
        """
        return work(*inputs)

    @abstractmethod
    def warm_up_shapes(self, *, max_batched_tokens: int, max_num_seqs: int, max_len: int) -> Iterator[WarmUpShape]:
        """What to run before serving, largest first."""

    def working_on(self, rows: int) -> AbstractContextManager[None]:
        """Around everything that is computed for `rows` tokens at a time: a device may set itself up for so many."""
        return nullcontext()

    @abstractmethod
    def available_memory_bytes(self) -> int:
        """What this process may still allocate."""

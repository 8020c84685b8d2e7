"""What the model needs of a device. One back end per file; the model never asks which one it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hpu_engine.model.step_ops import StepOps

Linear = Callable[[Tensor], Tensor]
"""[rows, in] to [rows, out], bias included."""

Gate = Callable[[Tensor], Tensor]
"""[rows, 2 * width], gate first, to silu(gate) * up [rows, width]."""

ExpertKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states [rows, hidden], indices of experts [rows, top_k] (none of the kernel's: elsewhere) and their weights
[rows, top_k], to float32 sums [rows, hidden].
"""


class UnsupportedOnDevice(Exception):
    """The device cannot do what the configuration asks; the message says what it can."""


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
    default_max_batched_tokens: int
    step_ops: StepOps | None = None
    """The device's own kernels for what a layer does between its linears; None: torch's operators."""

    @abstractmethod
    def compute_dtype(self, requested: str) -> torch.dtype:
        """The type activations, weights and KV have when `requested` (`float32`, `bfloat16`, `float16`) is asked for.
        Raises UnsupportedOnDevice.
        """

    def operand_dtype(self, compute: torch.dtype) -> torch.dtype:
        """The type that weights, keys and values are multiplied in where activations have the type `compute`; keys and
        values are kept in it.
        """
        return compute

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None, *, rounds: bool = True) -> Linear:
        """The fastest kernel for `weight` [out, in], which it may keep, repack or drop. `rounds`: activations may be
        rounded to the operands' type.
        """

    @property
    @abstractmethod
    def gate(self) -> Gate:
        """The gated activation of an MLP, dense or an expert's."""

    @abstractmethod
    def experts(self, experts: Sequence[tuple[Linear, Linear]]) -> ExpertKernel:
        """One kernel for experts of one window, each a gate-and-up and a down linear of this device."""

    @abstractmethod
    def exact_group_rows(
        self, *, group: int, chunk_rows: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> int:
        """To how many rows exact attention pads the `group` query rows of a single token, so that they get the bits
        they would get among the `chunk_rows` rows of a slice of a chunk. Raises UnsupportedOnDevice.
        """

    @abstractmethod
    def warm_up_shapes(self, *, max_batched_tokens: int, max_num_seqs: int, max_len: int) -> Iterator[WarmUpShape]:
        """What to run before serving, largest first."""

    def working_on(self, rows: int) -> AbstractContextManager[None]:
        """Around everything that is computed for `rows` tokens at a time: a device may set itself up for so many."""
        return nullcontext()

    @abstractmethod
    def available_memory_bytes(self) -> int:
        """What this process may still allocate."""

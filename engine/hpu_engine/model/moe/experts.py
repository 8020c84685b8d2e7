"""The experts of one rank: a window of all experts, applied to the rows that chose one of them.

The kernel is the device's. Rows are processed in pieces of `chunk_tokens`, which bounds the memory of the intermediate
activations whatever the batch. The result is this rank's partial sum; rows that chose no expert of the window are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpu_engine.device.base import ExpertKernel
from hpu_engine.model.moe.dispatcher import Dispatched
from hpu_engine.model.moe.window import ExpertWindow
from hpu_engine.planning.memory.activations import EXPERT_CHUNK_TOKENS


class Experts(Protocol):
    def prepare(self, x: Tensor) -> Tensor:
        """Before the dispatch, row by row."""

    def __call__(self, dispatched: Dispatched, dtype: torch.dtype) -> Tensor:
        """Partial sums [rows, hidden] as `dtype`."""


@dataclass(frozen=True, slots=True)
class WindowExperts:
    """Experts on activations as they are."""

    window: ExpertWindow
    kernel: ExpertKernel
    chunk_tokens: int = EXPERT_CHUNK_TOKENS

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, dispatched: Dispatched, dtype: torch.dtype) -> Tensor:
        hidden, weights = dispatched.hidden, dispatched.routing.weights
        # The window's experts are 0 to size - 1 for the kernel; padding and the experts of others lie outside.
        ids = dispatched.routing.ids - self.window.first if self.window.first else dispatched.routing.ids
        if hidden.shape[0] <= self.chunk_tokens:
            return self.kernel(hidden, ids, weights).to(dtype)
        pieces = zip(*(torch.split(part, self.chunk_tokens) for part in (hidden, ids, weights)), strict=True)
        return torch.cat([self.kernel(*piece) for piece in pieces]).to(dtype)


@dataclass(frozen=True, slots=True)
class QuantisedInputExperts:
    """The same experts behind activations that travel as float8 with one static scale: value = float8 * scale.

    `largest` is what the card's float8 holds (240 on Gaudi 2, 448 on Gaudi 3).
    """

    inner: WindowExperts
    scale: float
    largest: float

    def prepare(self, x: Tensor) -> Tensor:
        scaled = (x.float() / self.scale).clamp(-self.largest, self.largest)
        return scaled.to(torch.float8_e4m3fn)

    def __call__(self, dispatched: Dispatched, dtype: torch.dtype) -> Tensor:
        wide = (dispatched.hidden.float() * self.scale).to(dtype)
        return self.inner(Dispatched(wide, dispatched.routing), dtype)

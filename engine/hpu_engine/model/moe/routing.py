"""What the router decides and the other three parts obey."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOWHERE = -1
"""The expert id of a padding row: in no rank's window, so it meets no expert and carries no load."""


@dataclass(frozen=True, slots=True)
class Routing:
    """`ids` [tokens, top_k] int64, `weights` [tokens, top_k] in the activations' type, for every routing variant.

    A padding row has ids `NOWHERE` and weights 0.
    """

    ids: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        assert self.ids.dtype == torch.int64, f"expert ids are int64, not {self.ids.dtype}"
        assert self.ids.shape == self.weights.shape, f"{self.ids.shape} ids, {self.weights.shape} weights"

    @property
    def is_real(self) -> Tensor:
        """[tokens] bool: False for padding rows."""
        return self.ids[:, 0] != NOWHERE

    def load(self, experts: int) -> Tensor:
        """[experts] int64: how many tokens chose each expert, padding excluded."""
        chosen = self.ids[self.ids != NOWHERE]
        return torch.bincount(chosen, minlength=experts)

    def amax(self, hidden: Tensor) -> Tensor:
        """The largest magnitude in `hidden` [tokens, width] float32 scalar, padding excluded; 0 of no real row."""
        real = hidden[self.is_real]
        return real.abs().amax().float() if real.numel() else hidden.new_zeros((), dtype=torch.float32)

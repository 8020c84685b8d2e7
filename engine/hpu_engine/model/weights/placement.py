"""Which part of every tensor one worker of a group holds. Torch-free arithmetic on planning's table of tensors.

Workers of a group are numbered with tensor-parallel neighbours side by side: worker = data rank * tensor + tensor rank.
Under expert parallelism routed experts are given out whole, in windows over all workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hpu_engine.model.moe.window import ExpertWindow, expert_window
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.model.description import ModelDescription
from hpu_engine.planning.model.parameters import Cut, TensorRow

Region = tuple[tuple[int, int], ...]
"""Start and stop on every axis of a stored tensor."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker of a group; by default the only one."""

    layout: Layout = field(default_factory=Layout)
    worker: int = 0

    @property
    def tensor_rank(self) -> int:
        return self.worker % self.layout.tensor

    @property
    def data_rank(self) -> int:
        return self.worker // self.layout.tensor

    def heads(self, model: ModelDescription) -> int:
        return model.heads // self.layout.tensor

    def kv_heads(self, model: ModelDescription) -> int:
        return self.layout.kv_heads_per_card(model)

    def vocab_rows(self, model: ModelDescription) -> tuple[int, int]:
        """First and last + 1 token id whose embedding and logit are here."""
        return _share(model.vocab, self.layout.tensor, self.tensor_rank)

    def experts(self, model: ModelDescription) -> ExpertWindow:
        """The window of routed experts held here. Raises PlanError where they cannot be given out evenly."""
        assert model.moe is not None
        if self.layout.expert == 1:
            return ExpertWindow(0, model.moe.experts - 1)
        return expert_window(model.moe.experts, self.layout.expert, self.worker)

    def region(self, model: ModelDescription, row: TensorRow, expert: int | None) -> Region | None:
        """What of one tensor of `row` is held here; None: nothing."""
        whole = tuple((0, size) for size in row.shape)
        if row.routed:
            assert expert is not None
            if expert not in self.experts(model):
                return None
            if self.layout.expert > 1:
                return whole
        match row.cut:
            case Cut.NONE:
                return whole
            case Cut.ROWS:
                return (_share(row.shape[0], self.layout.tensor, self.tensor_rank), *whole[1:])
            case Cut.COLUMNS:
                return (*whole[:-1], _share(row.shape[-1], self.layout.tensor, self.tensor_rank))
            case Cut.KV_HEADS:
                return (self._kv_rows(model), *whole[1:])

    def _kv_rows(self, model: ModelDescription) -> tuple[int, int]:
        """Rows of the KV heads that this rank's query heads attend to; with few heads several ranks hold the same."""
        first = self.tensor_rank * model.kv_heads // self.layout.tensor
        return first * model.head_dim, (first + self.kv_heads(model)) * model.head_dim


def _share(size: int, parts: int, index: int) -> tuple[int, int]:
    assert size % parts == 0, "an uneven layout is refused before anything is placed"
    return index * size // parts, (index + 1) * size // parts

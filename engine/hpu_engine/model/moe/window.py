"""Which experts a rank holds: one window of consecutive ones. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from hpu_engine.planning.violations import PlanError, Violation, nearest_valid


@dataclass(frozen=True, slots=True)
class ExpertWindow:
    """Experts `first` to `last`, both included."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, expert: int) -> bool:
        return self.first <= expert <= self.last


def expert_window(experts: int, ranks: int, rank: int) -> ExpertWindow:
    """The window of `rank`; windows of all ranks are disjoint, equally large and cover `experts`.

    Raises PlanError, with the nearest sizes that are possible, where `ranks` does not divide `experts`.
    """
    if experts % ranks:
        nearest = nearest_valid(ranks, lambda size: experts % size == 0, most=experts)
        raise PlanError([Violation("expert", "experts", ranks, f"does not divide the {experts} experts", nearest)])
    size = experts // ranks
    return ExpertWindow(rank * size, (rank + 1) * size - 1)

"""Which shapes to compile: the set that is expected to waste least, for a number of recipes.

Policy. Every cell of the candidate lattice that a scheduler can hit is a point with a weight (how often a step hits
it). At first every candidate is a bucket. Then, again and again over all kinds together, the bucket whose points lose
least per recipe by moving to the next cheaper bucket that covers them is dropped, until the budget is met. The bucket
of the clipped maxima of each kind is never dropped, so coverage holds at every moment, whatever the weights.

Dropping is greedy. In one size it is compared with the exact optimum in the tests.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpu_engine.planning.shapes.lattice import lattices
from hpu_engine.planning.shapes.limits import RECIPES_PER_SHAPE, Kind, Size, StepLimits
from hpu_engine.planning.shapes.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Histogram:
    """Expected calls of each shape per step.

    `unseen` is the time, as a share of what the histogram knows, that is spread over all shapes alike: how little the
    histogram is trusted. It keeps rare shapes from being padded without end.
    """

    calls: Mapping[Kind, Mapping[Size, float]]
    unseen: float


class TooFewRecipes(ValueError):
    """The recipe budget is below what coverage needs."""

    def __init__(self, budget: int, needed: int) -> None:
        self.budget = budget
        self.needed = needed
        super().__init__(f"a budget of {budget} recipes cannot cover every shape; at least {needed} are needed")


@dataclass(slots=True)
class _Field:
    """Candidates and points of one kind. Candidates are in order of cost; a point knows the two cheapest that live."""

    kind: Kind
    sizes: list[Size]
    costs: list[float]
    alive: list[bool]
    points: list[Size]
    weights: list[float]
    current: list[int] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    members: list[list[int]] = field(default_factory=list)

    def loss(self, candidate: int) -> float:
        """Weighted cost of moving the candidate's points to their next bucket."""
        total = 0.0
        for point in self.members[candidate]:
            follower = self.next_cover(point, self.following[point])
            self.following[point] = follower
            total += self.weights[point] * (self.costs[follower] - self.costs[candidate])
        return total

    def drop(self, candidate: int) -> None:
        self.alive[candidate] = False
        for point in self.members[candidate]:
            follower = self.following[point]
            self.current[point] = follower
            self.members[follower].append(point)
            self.following[point] = min(follower + 1, len(self.sizes) - 1)
        self.members[candidate] = []

    def next_cover(self, point: int, start: int) -> int:
        """The first live candidate from `start` on that covers the point; the last candidate covers all, for ever."""
        first, second = self.points[point]
        sizes, alive = self.sizes, self.alive
        index = start
        while not (alive[index] and sizes[index][0] >= first and sizes[index][1] >= second):
            index += 1
        return index


def choose_buckets(
    limits: StepLimits, cost: StepCost, histogram: Histogram, *, recipes: int
) -> dict[Kind, tuple[Size, ...]]:
    """At most `recipes` recipes covering every shape under `limits`. Raises TooFewRecipes."""
    fields = [_field(kind, limits, cost, histogram, recipes) for kind in Kind]
    count = sum(len(f.sizes) * RECIPES_PER_SHAPE[f.kind] for f in fields)
    heap = [
        (f.loss(candidate) / RECIPES_PER_SHAPE[f.kind], number, candidate)
        for number, f in enumerate(fields)
        for candidate in range(len(f.sizes) - 1)
    ]
    heapq.heapify(heap)
    while count > recipes and heap:
        known, number, candidate = heapq.heappop(heap)
        f = fields[number]
        # Losses only grow as others are dropped, so an old entry is a lower bound: renew it before trusting it.
        loss = f.loss(candidate) / RECIPES_PER_SHAPE[f.kind]
        if loss > known and heap and loss > heap[0][0]:
            heapq.heappush(heap, (loss, number, candidate))
            continue
        f.drop(candidate)
        count -= RECIPES_PER_SHAPE[f.kind]
    if count > recipes:
        raise TooFewRecipes(recipes, count)
    return {f.kind: tuple(sorted(size for size, alive in zip(f.sizes, f.alive, strict=True) if alive)) for f in fields}


def _field(kind: Kind, limits: StepLimits, cost: StepCost, histogram: Histogram, recipes: int) -> _Field:
    firsts, seconds = lattices(kind, limits, recipes)
    points = _cells(kind, limits, firsts, seconds)
    weights = _weights(kind, cost, points, (firsts, seconds), histogram)
    sizes = sorted(((a, b) for a in firsts for b in seconds), key=lambda size: (cost.work_seconds(kind, size), size))
    f = _Field(
        kind=kind,
        sizes=sizes,
        costs=[cost.work_seconds(kind, size) for size in sizes],
        alive=[True] * len(sizes),
        points=points,
        weights=weights,
        members=[[] for _ in sizes],
    )
    home = {size: index for index, size in enumerate(sizes)}
    for point, size in enumerate(points):
        # Whatever else covers a cell contains its corner, hence costs at least as much.
        index = home[size]
        f.current.append(index)
        f.members[index].append(point)
        f.following.append(min(index + 1, len(sizes) - 1))
    return f


def _cells(kind: Kind, limits: StepLimits, firsts: Iterable[int], seconds: Iterable[int]) -> list[Size]:
    """The upper corners of all lattice cells that hold a shape that can occur."""
    columns = [(low, high) for low, high in zip((0, *tuple(seconds)[:-1]), seconds, strict=True)]
    cells = []
    for low, high in zip((0, *tuple(firsts)[:-1]), firsts, strict=True):
        for left, right in columns:
            if limits.can_emit(kind, (low, left), (high, right)):
                cells.append((high, right))
    return cells


def _weights(
    kind: Kind,
    cost: StepCost,
    points: list[Size],
    lattice: tuple[tuple[int, ...], tuple[int, ...]],
    histogram: Histogram,
) -> list[float]:
    firsts, seconds = lattice
    seen = histogram.calls.get(kind, {})
    total = sum(weight * cost.work_seconds(kind, size) for size, weight in seen.items()) or 1.0
    # Every cell has the same share of the time, so that the rare large shapes do not decide over the common ones.
    share = histogram.unseen * total / len(points)
    weights = {point: share / cost.work_seconds(kind, point) for point in points}
    for (first, second), weight in seen.items():
        cell = (firsts[bisect_left(firsts, first)], seconds[bisect_left(seconds, second)])
        weights[cell] += weight
    return [weights[point] for point in points]

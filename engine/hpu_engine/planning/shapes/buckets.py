"""The chosen shapes, and the look-up that maps a shape to the cheapest bucket covering it.

Invariant: every shape under the limits is covered; the constructor proves it and refuses a set that is not. Look-up
is two binary searches and one table access.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpu_engine.planning.shapes.choice import Histogram, choose_buckets
from hpu_engine.planning.shapes.limits import RECIPES_PER_SHAPE, Kind, Size, StepLimits, StepShape, split_decode
from hpu_engine.planning.shapes.step_cost import StepCost


def shape_in_words(kind: Kind, size: Size) -> str:
    """The name of a shape in plans, progress and evidence of a death."""
    first, second = size
    match kind:
        case Kind.PREFILL:
            return f"prefill {first} tokens + {second} blocks"
        case Kind.DECODE:
            return f"decode {first} rows, {second} blocks"
        case Kind.FLAT:
            return f"flat {first} tokens"
        case Kind.SAMPLER:
            return f"sampler {first} rows"


class UncoveredShape(LookupError):
    """A shape that no bucket covers: outside the limits the set was made for."""

    def __init__(self, kind: Kind, size: Size, limits: StepLimits) -> None:
        self.kind = kind
        self.size = size
        largest = limits.largest(kind)
        super().__init__(f"no {kind} bucket covers {size}; the largest shape under the limits is {largest}")


@dataclass(frozen=True, slots=True)
class Bucket:
    """One compiled shape. `seconds` is the estimated time of one call, for a scheduler to compare shapes with."""

    kind: Kind
    size: Size
    seconds: float

    @property
    def recipes(self) -> int:
        return RECIPES_PER_SHAPE[self.kind]

    def __str__(self) -> str:
        return shape_in_words(self.kind, self.size)


class _Table:
    """Both sizes cut at the buckets' own values; each cell knows the cheapest bucket that covers it."""

    __slots__ = ("_cells", "_firsts", "_seconds", "_stride")

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._firsts = sorted({bucket.size[0] for bucket in buckets})
        self._seconds = sorted({bucket.size[1] for bucket in buckets})
        self._stride = len(self._seconds) + 1
        at = {bucket.size: bucket for bucket in buckets}
        # One row and one column more than values: what lies beyond the largest is covered by none.
        cells: list[Bucket | None] = [None] * ((len(self._firsts) + 1) * self._stride)
        for i in range(len(self._firsts) - 1, -1, -1):
            for j in range(len(self._seconds) - 1, -1, -1):
                here = at.get((self._firsts[i], self._seconds[j]))
                place = i * self._stride + j
                options = [b for b in (here, cells[place + self._stride], cells[place + 1]) if b is not None]
                cells[place] = min(options, key=lambda b: b.seconds, default=None)
        self._cells = cells

    def find(self, first: int, second: int) -> Bucket | None:
        row = bisect_left(self._firsts, first)
        return self._cells[row * self._stride + bisect_left(self._seconds, second)]


class BucketSet:
    """All buckets of a rank. Raises UncoveredShape when built from sizes that do not cover the limits."""

    def __init__(self, limits: StepLimits, cost: StepCost, sizes: Mapping[Kind, Iterable[Size]]) -> None:
        self.limits = limits
        self._buckets = {
            kind: tuple(Bucket(kind, size, cost.step_seconds(kind, size)) for size in sorted(set(sizes[kind])))
            for kind in Kind
        }
        self._tables = {kind: _Table(buckets) for kind, buckets in self._buckets.items()}
        for kind, size in uncovered(self, limits):
            raise UncoveredShape(kind, size, limits)

    def of(self, kind: Kind) -> tuple[Bucket, ...]:
        """The buckets of `kind`, smallest first."""
        return self._buckets[kind]

    def __iter__(self) -> Iterator[Bucket]:
        for buckets in self._buckets.values():
            yield from buckets

    @property
    def recipes(self) -> int:
        return sum(bucket.recipes for buckets in self._buckets.values() for bucket in buckets)

    def find(self, kind: Kind, first: int, second: int = 0) -> Bucket:
        """The cheapest bucket that covers the shape. Raises UncoveredShape."""
        bucket = self._tables[kind].find(first, second)
        if bucket is None:
            raise UncoveredShape(kind, (first, second), self.limits)
        return bucket

    def covers(self, kind: Kind, size: Size) -> bool:
        return self._tables[kind].find(*size) is not None

    def step(self, shape: StepShape) -> tuple[Bucket, ...]:
        """One bucket for each call that runs `shape`."""
        return tuple(self.find(kind, *size) for kind, size in shape.parts())

    def decode_calls(self, blocks_per_row: Sequence[int]) -> tuple[Bucket, ...]:
        """One bucket for each decode call; more than one only where shared prefix blocks exceed the largest."""
        most = self.limits.decode_blocks
        return tuple(self.find(Kind.DECODE, *size) for size in split_decode(blocks_per_row, most))


def plan_buckets(limits: StepLimits, cost: StepCost, histogram: Histogram, *, recipes: int) -> BucketSet:
    """The set of at most `recipes` recipes with the least expected padding. Raises TooFewRecipes."""
    return BucketSet(limits, cost, choose_buckets(limits, cost, histogram, recipes=recipes))


def uncovered(buckets: BucketSet, limits: StepLimits) -> Iterator[tuple[Kind, Size]]:
    """The proof of coverage: maximal shapes that no bucket covers. Empty means that every shape is covered."""
    for kind in Kind:
        for size in limits.maximal(kind):
            if not buckets.covers(kind, size):
                yield kind, size

"""A caching allocator in miniature: why warm-up runs the largest shape first.

Device memory is obtained in segments. Running a recipe takes its workspace and frees it; what the recipe keeps (its
commands, its static outputs) is carved out of whatever is free at that moment and stays. A captured graph replays at
fixed addresses, so a segment that a recipe has run in is used by others again but never given back. Ascending sizes
therefore obtain a new, larger segment each time, and the sum of the workspaces is reserved in the end. Descending sizes
are all served from the first segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ALIGNMENT_BYTES = 512
SEGMENT_BYTES = 2 << 20
"""Sizes of allocations and segments are rounded up to these, as caching allocators do."""


class OutOfMemory(Exception):
    """The recipe named `name` could not have `wanted` bytes: `reserved` of `capacity` bytes are held in segments."""

    def __init__(self, name: str, wanted: int, reserved: int, capacity: int) -> None:
        self.name = name
        self.wanted = wanted
        self.reserved = reserved
        self.capacity = capacity
        super().__init__(
            f"{name}: {wanted} bytes wanted, {reserved} of {capacity} reserved and none of them free enough"
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One warm-up run: `workspace_bytes` while it runs, `kept_bytes` for ever after."""

    name: str
    workspace_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class WarmUpMemory:
    """`reserved_bytes` after each run in order; `used_bytes` is what is in use at the end."""

    reserved_bytes: tuple[int, ...]
    used_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Most that was ever reserved, which is what is reserved at the end."""
        return self.reserved_bytes[-1] if self.reserved_bytes else 0

    @property
    def fragmented_bytes(self) -> int:
        """Reserved at the end and not in use."""
        return self.peak_bytes - self.used_bytes


@dataclass(slots=True)
class _Segment:
    size: int
    free: list[tuple[int, int]] = field(default_factory=list)
    """(offset, size) of free ranges, by offset, never adjacent."""


class CachingAllocator:
    """Best fit over the free ranges of all segments; a new segment where none is large enough."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._capacity = capacity_bytes
        self._segments: list[_Segment] = []
        self.used_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    def allocate(self, size: int, name: str) -> tuple[_Segment, int, int]:
        """A range of `size` bytes, rounded up. Raises OutOfMemory."""
        wanted = _round_up(max(size, 1), ALIGNMENT_BYTES)
        fit = min(
            (
                (length, index, offset)
                for index, segment in enumerate(self._segments)
                for offset, length in segment.free
                if length >= wanted
            ),
            default=None,
        )
        segment = self._segments[fit[1]] if fit is not None else self._obtain(wanted, name)
        offset = fit[2] if fit is not None else 0
        position = next(i for i, (start, _) in enumerate(segment.free) if start == offset)
        _, length = segment.free.pop(position)
        if length > wanted:
            segment.free.insert(position, (offset + wanted, length - wanted))
        self.used_bytes += wanted
        return segment, offset, wanted

    def release(self, taken: tuple[_Segment, int, int]) -> None:
        """Give a range back; neighbouring free ranges become one."""
        segment, offset, size = taken
        self.used_bytes -= size
        ranges = sorted([*segment.free, (offset, size)])
        merged: list[tuple[int, int]] = []
        for start, length in ranges:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        segment.free = merged

    def _obtain(self, wanted: int, name: str) -> _Segment:
        size = _round_up(wanted, SEGMENT_BYTES)
        if self._capacity is not None and self.reserved_bytes + size > self._capacity:
            raise OutOfMemory(name, size, self.reserved_bytes, self._capacity)
        segment = _Segment(size, [(0, size)])
        self._segments.append(segment)
        return segment


def warm_up_memory(runs: Iterable[Run], capacity_bytes: int | None = None) -> WarmUpMemory:
    """Run them in order. Raises OutOfMemory where `capacity_bytes` do not hold them."""
    allocator = CachingAllocator(capacity_bytes)
    reserved = []
    for run in runs:
        workspace = allocator.allocate(run.workspace_bytes, run.name)
        allocator.allocate(run.kept_bytes, run.name)
        allocator.release(workspace)
        reserved.append(allocator.reserved_bytes)
    return WarmUpMemory(tuple(reserved), allocator.used_bytes)


def ascending(runs: Sequence[Run]) -> list[Run]:
    """The order that does not work: smallest workspace first."""
    return sorted(runs, key=lambda run: run.workspace_bytes)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit

"""A set of ranks in one process, one thread each: the collectives without processes, for proofs and for small runs.

What each rank called is recorded, so that "all ranks issue the same sequence" can be checked. A rank that makes a call
the others do not make is an error here after `timeout_seconds`, where real collectives would hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class UnpairedCollective(RuntimeError):
    """Not every rank of a group made the same call."""


@dataclass(slots=True)
class InProcessRank:
    """One rank's side. `calls` are the names and shapes of what it called."""

    group: InProcessGroup
    rank: int
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return _sum(self._meet("all_reduce", x))

    def all_gather(self, x: Tensor) -> Tensor:
        parts = self._meet("all_gather", x)
        if x.dtype.itemsize == 1:  # float8 has no concatenation of its own
            return torch.cat([part.view(torch.uint8) for part in parts]).view(x.dtype)
        return torch.cat(list(parts))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if x.shape[0] % self.size:
            raise UnpairedCollective(f"{x.shape[0]} rows cannot be scattered over {self.size} ranks")
        return _sum([part.chunk(self.size)[self.rank] for part in self._meet("reduce_scatter", x)])

    def _meet(self, name: str, x: Tensor) -> Sequence[Tensor]:
        self.calls.append((name, tuple(x.shape)))
        return self.group.exchange(self.rank, name, x)


class InProcessGroup:
    """`run` gives every rank a thread and returns their results in rank order."""

    def __init__(self, size: int, timeout_seconds: float = 30.0) -> None:
        self.size = size
        self.ranks = tuple(InProcessRank(self, rank) for rank in range(size))
        self._barrier = threading.Barrier(size, timeout=timeout_seconds)
        self._offered: list[tuple[str, Tensor] | None] = [None] * size

    def exchange(self, rank: int, name: str, x: Tensor) -> Sequence[Tensor]:
        """What every rank offered to the same call, in rank order."""
        self._offered[rank] = (name, x)
        self._wait()
        offered = [entry for entry in self._offered if entry is not None]
        names = {other for other, _ in offered}
        parts = [part for _, part in offered]
        self._wait()  # nobody offers to the next call before everybody has read this one
        if len(names) > 1:
            raise UnpairedCollective(f"ranks called {sorted(names)} at the same time")
        if name != "all_gather" and len({part.shape for part in parts}) > 1:
            raise UnpairedCollective(f"{name} of unequal shapes {[tuple(part.shape) for part in parts]}")
        return parts

    def run(self, work: Callable[[InProcessRank], Result]) -> list[Result]:
        """`work(rank)` on every rank at once. Raises what the first failing rank raised."""

        def guarded(rank: InProcessRank) -> Result:
            try:
                with torch.inference_mode():
                    return work(rank)
            except BaseException:
                self._barrier.abort()  # let the others go at once
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, rank) for rank in self.ranks]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, UnpairedCollective)), errors[0])
        return [future.result() for future in futures]

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise UnpairedCollective("another rank of the group did not come") from None


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total

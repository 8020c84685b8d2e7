"""Which kernel multiplies by a weight: candidates of this build and processor, timed once per shape before serving.

A worker keeps one layout of a weight, so the choice is by all row counts a step has: one, a few, a full batch, a chunk.
Times are CPU times of one thread: wall time, or threads that wait for each other, would measure the neighbours. Whether
one row is worth all threads can only be told from wall time. In a step a weight has left the caches since its last use,
so it is made to leave them here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import Linear
from hpu_engine.device.cpu.half_weights import half_linear

Kernel = Callable[[Tensor, Tensor | None], Linear | None]
"""A weight [out, in] and a bias to a linear; None where the build, the processor or the weight does not allow it."""

ROWS = (1, 8, 32, 256)
LARGE_ELEMENTS = 16 * 1024 * 1024
MOST_ROWS_OF_LARGE = 32
"""A matrix as large as an output vocabulary sees the rows that emit a token, never those of a chunk."""

_EVICTING_BYTES = 8 * 1024 * 1024
"""More than the caches of one core hold."""
_SECONDS_PER_SHAPE = 0.004
_REPEATS, _MOST_TRIES = 5, 20
_WORTH = 0.85
"""Of one thread's time: all threads make room for others worse than one does."""
_HOPELESS = 3.0
"""A kernel that is this many times slower than another at some row count is timed no further."""


class LinearKernels:
    """`build` gives each weight the best kernel for its shape."""

    def __init__(self) -> None:
        self._orders: dict[tuple[torch.dtype, int, int], tuple[Kernel, ...]] = {}
        self._worth_threads: dict[tuple[torch.dtype, int, int], bool] = {}

    def build(self, weight: Tensor, bias: Tensor | None) -> Linear:
        key = (weight.dtype, weight.shape[0], weight.shape[1])
        if key not in self._orders:
            self._orders[key] = _fastest_first(weight, bias)
        # A weight whose digits the fastest kernel would lose gets the next one.
        linear = next(linear for kernel in self._orders[key] if (linear := kernel(weight, bias)) is not None)
        if key not in self._worth_threads:
            self._worth_threads[key] = _is_worth_threads(linear, _sample(1, weight))
        return AllThreads(linear, torch.get_num_threads()) if self._worth_threads[key] else linear


@dataclass(frozen=True, slots=True)
class PlainLinear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, /) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """`weight` is in oneDNN's own layout."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, /) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class AllThreads:
    """`linear` by this many threads, also where a step is given fewer. To change that takes no time."""

    linear: Linear
    threads: int

    def __call__(self, x: Tensor, /) -> Tensor:
        given = torch.get_num_threads()
        if given == self.threads:
            return self.linear(x)
        torch.set_num_threads(self.threads)
        try:
            return self.linear(x)
        finally:
            torch.set_num_threads(given)


def packed(weight: Tensor, bias: Tensor | None) -> PackedLinear | None:
    """None where oneDNN has no layout of its own for `weight`."""
    try:
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight, 32), bias)
    except (RuntimeError, AttributeError):
        return None


KERNELS: tuple[Kernel, ...] = (half_linear, packed, PlainLinear)


def _fastest_first(weight: Tensor, bias: Tensor | None) -> tuple[Kernel, ...]:
    linears = {kernel: linear for kernel in KERNELS if (linear := kernel(weight, bias)) is not None}
    if len(linears) == 1:
        return KERNELS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        costs = dict.fromkeys(linears, 0.0)
        for rows in ROWS:
            if rows <= MOST_ROWS_OF_LARGE or weight.numel() < LARGE_ELEMENTS:
                for kernel, ratio in _slowdowns(linears, _sample(rows, weight)).items():
                    costs[kernel] += ratio
    finally:
        torch.set_num_threads(threads)
    return tuple(sorted(KERNELS, key=lambda kernel: costs.get(kernel, 0.0)))


def _slowdowns(linears: dict[Kernel, Linear], x: Tensor) -> dict[Kernel, float]:
    """Each kernel's best time over the fastest one's, taken in turns so that a disturbance meets all."""
    best = dict.fromkeys(linears, float("inf"))
    spent = 0.0
    for _ in range(_REPEATS):
        least = min(best.values())
        for kernel, linear in linears.items():
            if best[kernel] < float("inf") and best[kernel] > _HOPELESS * least:
                continue
            _evict()
            started = time.thread_time()
            linear(x)
            took = time.thread_time() - started
            best[kernel] = min(best[kernel], took)
            spent += took
        if spent > _SECONDS_PER_SHAPE * len(linears) and all(value < float("inf") for value in best.values()):
            break
    least = min(best.values())
    return {kernel: value / least for kernel, value in best.items()}


def _is_worth_threads(linear: Linear, x: Tensor) -> bool:
    """Whether all threads take clearly less wall time than one, both at their best: beside a busy neighbour it takes
    some tries until both threads have a core at once.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return False
    best = dict.fromkeys((1, threads), float("inf"))
    try:
        for number in range(_MOST_TRIES):
            for count in best:
                torch.set_num_threads(count)
                _evict()
                started = time.perf_counter()
                linear(x)
                best[count] = min(best[count], time.perf_counter() - started)
            if number + 1 >= _REPEATS and best[threads] < _WORTH * best[1]:
                return True
    finally:
        torch.set_num_threads(threads)
    return False


def _evict() -> None:
    _evicting().max()


@cache
def _evicting() -> Tensor:
    return torch.ones(_EVICTING_BYTES // 4)


def _sample(rows: int, weight: Tensor) -> Tensor:
    return torch.randn(rows, weight.shape[1]).to(weight.dtype)

"""A fixed amount of work in this process, timed: what the machine was worth when a figure was taken.

Machines of one size differ and drift by tens of percent; two figures can be compared when their reference steps agree.
The step is made of what a decode step is made of: products of 32 rows with matrices, and memory read once. One thread:
two threads that wait for each other measure the neighbours.
"""

from __future__ import annotations

import time

import numpy as np

_BLOCKS, _ROWS, _IN, _OUT = 768, 32, 64, 128
"""Blocks so small that no BLAS gives them to several threads."""
_STREAM_FLOATS = 8 * 1024 * 1024
_REPEATS = 7


class ReferenceStep:
    """`measure` runs the step a few times and gives the fastest, in milliseconds."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._x = rng.standard_normal((_ROWS, _IN), dtype=np.float32)
        self._weights = rng.standard_normal((_BLOCKS, _IN, _OUT), dtype=np.float32)
        self._stream = np.ones(_STREAM_FLOATS, dtype=np.float32)

    def measure(self) -> float:
        return min(self._once() for _ in range(_REPEATS))

    def _once(self) -> float:
        started = time.perf_counter()
        np.matmul(self._x, self._weights)
        self._stream.sum()
        return 1000 * (time.perf_counter() - started)

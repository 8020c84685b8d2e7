"""Matrix products whose result for a row does not depend on how many rows are multiplied with it.

Libraries choose kernels by the number of rows, and kernels add in different orders. Which row counts are treated alike
differs between processors, so it is found out here, on matrices of the shape that will be used, before the first
request: a product is then only called with row counts between `least` (by padding) and `most` (by slicing) of one
class. The narrowest class, one row at a time, always holds.

The operands that are tried cancel: each sum is 0 but for what rounding leaves of it, and that is all order. Of random
operands a result in bfloat16 shows another order once in some ten thousand elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import Linear

EDGES = (*range(1, 34), 40, 47, 48, 49, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256)
"""Row counts tried: all small ones, and both sides of the counts where libraries are known to change kernels."""
MOST_ROWS = 256
MOST_ROWS_OF_LARGE = 64
LARGE_ELEMENTS = 16 * 1024 * 1024
"""A matrix as large as an output vocabulary sees few rows, and trying many would take seconds."""


@dataclass(frozen=True, slots=True)
class RowClass:
    """Row counts that give a row the same bits."""

    least: int
    most: int


CANDIDATES = (
    *(RowClass(least, most) for most in (MOST_ROWS, 32) for least in (1, 2, 4, 8, 16, 32)),
    RowClass(1, 1),
)
"""Widest first; (32, 32) is one fixed shape, which only needs a row's place not to matter."""


def find_row_class(build: Callable[[Tensor], Linear], shape: tuple[int, int], dtype: torch.dtype) -> RowClass:
    """The widest class that holds for linears that `build` makes of weights of `shape` (out, in)."""
    out, width = shape
    limit = MOST_ROWS if out * width < LARGE_ELEMENTS else MOST_ROWS_OF_LARGE
    x, weight = _cancelling((MOST_ROWS + 7,), (out,), width, dtype)
    apply = build(weight)
    for candidate in CANDIDATES:
        bounded = RowClass(min(candidate.least, limit), min(candidate.most, limit))
        if _holds(apply, x, bounded):
            return bounded
    raise AssertionError("one row at a time is always a class of its own")


@dataclass(frozen=True, slots=True)
class ExactLinear:
    """`linear`, called with row counts of one class only."""

    linear: Linear
    rows: RowClass

    def __call__(self, x: Tensor, /) -> Tensor:
        rows = self.rows
        if rows.least <= x.shape[0] <= rows.most:
            return self.linear(x)
        parts = [self.linear(_padded(part, rows.least))[: part.shape[0]] for part in torch.split(x, rows.most)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def find_group_rows(group: int, chunk_rows: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    """To how many rows the `group` query rows of a single token must be padded so that both attention products give
    them the bits they get among the `chunk_rows` rows of a slice of a chunk.
    """
    queries, keys = _cancelling((16, chunk_rows), (16, block_size), head_dim, dtype)
    weights, values = _cancelling((16, chunk_rows), (16, head_dim), block_size, dtype)
    values = values.transpose(1, 2).contiguous()
    for rows in (group, 2, 4, 8, 16, 32):
        if group <= rows <= chunk_rows and (
            _same_when_few(lambda q, n: torch.bmm(q, keys[:n].transpose(1, 2)), queries, rows)
            and _same_when_few(lambda w, n: torch.bmm(w, values[:n]), weights, rows)
        ):
            return rows
    return chunk_rows


def _same_when_few(product: Callable[[Tensor, int], Tensor], left: Tensor, rows: int) -> bool:
    """Whether `rows` rows, from anywhere in the slice and in batches of any size, are as among all of them."""
    batch, count = left.shape[:2]
    whole = product(left, batch)
    starts = range(0, count - rows + 1, max(1, (count - rows) // 4))
    return all(
        torch.equal(product(left[:n, start : start + rows].contiguous(), n), whole[:n, start : start + rows])
        for start in starts
        for n in (1, 3, batch)
    )


def _holds(apply: Linear, x: Tensor, rows: RowClass) -> bool:
    counts = [count for count in EDGES if rows.least <= count <= rows.most]
    expected = torch.cat([apply(part) for part in _whole_slices(x, min(32, rows.most))])
    return all(
        torch.equal(apply(x[start : start + count].contiguous()), expected[start : start + count])
        for count in counts
        for start in (0, 7)
        if start + count <= expected.shape[0]
    )


def _whole_slices(x: Tensor, count: int) -> Iterator[Tensor]:
    for start in range(0, x.shape[0] - count + 1, count):
        yield x[start : start + count].contiguous()


def _padded(x: Tensor, least: int) -> Tensor:
    missing = least - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing > 0 else x.contiguous()


def _cancelling(left: tuple[int, ...], right: tuple[int, ...], width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`left` [..., width] and `right` [..., width] whose products along the width are sums of pairs x and -x, each pair
    at two places anywhere in the width.
    """
    generator = torch.Generator().manual_seed(width)
    places = torch.randperm(width, generator=generator)
    first, second, alone = places[: width // 2], places[width // 2 : width // 2 * 2], places[width // 2 * 2 :]
    one, other = (torch.randn(*shape, width, generator=generator).to(dtype) for shape in (left, right))
    one[..., second] = -one[..., first]
    one[..., alone] = 0.0
    other[..., second] = other[..., first]
    return one, other

"""Attention of the rows with one new token each, over the pages where they lie.

Gathering the pages of all rows would move every key and value twice more than the products themselves do. So the
products run over one run of pages, in place, each page with the query of the row that owns it; only scores, weights
and mixes, which are small, are brought into the order of the rows. Pages inside the run that belong to nobody here are
computed and thrown away. The run is copied together only where it would be mostly such pages, or where rows share one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.model.kv_cache import LayerCache

RUN_MULTIPLE = 8
"""A run is rounded up to this many pages where the library builds a kernel per shape: it then builds few. For float32
it builds none, and a single row would read several times the pages it has.
"""
WASTE_LIMIT = 3
"""A run in place reads each of its pages once; a copy reads, writes and reads again each wanted page."""


class SingleRows:
    """`tables` [rows, width] padded with scratch, `lens` [rows]: visible tokens. Both are of one step.

    `group` query rows share a KV head; they are multiplied as `padded_group` rows.
    """

    def __init__(self, tables: Tensor, lens: Tensor, cache: LayerCache, group: int, padded_group: int) -> None:
        rows, width = tables.shape
        size, kv_heads = cache.block_size, cache.keys.shape[1]
        heads = kv_heads * group
        num_pages = (lens + size - 1) // size
        wanted = torch.arange(width) < num_pages[:, None]
        pages = tables[wanted]
        row_of, column_of = wanted.nonzero(as_tuple=True)
        multiple = 1 if cache.keys.dtype is torch.float32 else RUN_MULTIPLE
        first, count = _run_in_place(pages, cache.num_pages, multiple)
        if count:
            self._run: slice | Tensor = slice(first, first + count)
            place = pages - first
        else:
            self._run, count = pages, pages.shape[0]
            place = torch.arange(count)
        # Pages of nobody take the query of row 0; what comes of them is never brought back.
        owner = torch.zeros(count, dtype=torch.int64).index_copy_(0, place, row_of)
        column = torch.zeros(count, dtype=torch.int64).index_copy_(0, place, column_of)
        page_at = torch.zeros(rows, width, dtype=torch.int64)
        page_at[wanted] = place
        # A missing column of a short row reads the row's first page, never one that may hold another's NaN: its weight
        # is exactly 0 there, its mix is left out.
        page_at = torch.where(wanted, page_at, page_at[:, :1])
        self._count, self._rows, self._width, self._heads = count, rows, width, heads
        self._group, self._padded_group = group, padded_group
        self._owner = owner
        # Rows of [pages * kv_heads * padded_group, block_size] in the order [row, head, column], and the way back, on
        # which padding takes the weights of head 0: its mix is dropped.
        head = torch.arange(heads)
        padded_heads = kv_heads * padded_group
        place_of_head = head // group * padded_group + head % group
        head_at_place = torch.zeros(padded_heads, dtype=torch.int64).index_copy_(0, place_of_head, head)
        self._to_rows = (page_at[:, None, :] * padded_heads + place_of_head[:, None]).flatten()
        self._to_pages = ((owner[:, None] * heads + head_at_place) * width + column[:, None]).flatten()
        visible = torch.arange(width * size) < lens[:, None]
        self._mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None, :]
        self._missing = None if bool(wanted.all()) else ~wanted.t()[:, :, None]
        self._columns = (page_at.t()).contiguous()

    def attend(self, q: Tensor, cache: LayerCache) -> Tensor:
        """`q` [rows, kv_heads, group, head_dim], scaled; the same shape back."""
        kv_heads, size, head_dim = cache.keys.shape[1:]
        batch, group = self._count * kv_heads, self._padded_group
        if group != self._group:
            q = F.pad(q, (0, 0, 0, group - self._group))
        keys, values = (self._pages(pages).view(batch, size, head_dim) for pages in (cache.keys, cache.values))
        queries = q.reshape(self._rows, -1).index_select(0, self._owner).view(batch, group, head_dim)
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(-1, size)
        by_row = scores.index_select(0, self._to_rows).view(self._rows, self._heads, -1)
        weights = torch.softmax(by_row.float() + self._mask, dim=-1).to(q.dtype)
        by_page = weights.view(-1, size).index_select(0, self._to_pages).view(batch, group, size)
        mixes = torch.bmm(by_page, values)[:, : self._group].reshape(self._count, -1)
        return self._add_in_order(mixes).view(self._rows, kv_heads, self._group, head_dim)

    def _add_in_order(self, mixes: Tensor) -> Tensor:
        """The mixes of each row's pages, added first page to last: [rows, heads * head_dim]."""
        total = mixes.index_select(0, self._columns[0])
        for column in range(1, self._width):
            mix = mixes.index_select(0, self._columns[column])
            if self._missing is not None:
                mix = mix.masked_fill_(self._missing[column], 0.0)
            total += mix
        return total

    def _pages(self, pages: Tensor) -> Tensor:
        return pages[self._run] if isinstance(self._run, slice) else pages.index_select(0, self._run)


def _run_in_place(pages: Tensor, num_pages: int, multiple: int) -> tuple[int, int]:
    """First page and number of pages of the run that covers `pages`; 0 pages where a copy is the better way."""
    if not pages.shape[0]:
        return 0, 1
    first, last = int(pages.min()), int(pages.max())
    first -= first % multiple
    count = min(-(-(last + 1 - first) // multiple) * multiple, num_pages - first)
    is_shared = len(set(pages.tolist())) < pages.shape[0]
    return (0, 0) if is_shared or count > WASTE_LIMIT * pages.shape[0] + multiple else (first, count)

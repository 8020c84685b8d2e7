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

from hpu_engine.device.cpu.kv_cache import LayerPages

RUN_MULTIPLE = 8
"""A run is rounded up to this many pages where the library builds a kernel per shape: it then builds few. For float32
it builds none, and a single row would read several times the pages it has.
"""
WASTE_LIMIT = 3
"""A run in place reads each of its pages once; a copy reads, writes and reads again each wanted page."""
FUSED_PAGES = 16
"""Up to so many pages the fused kernel is the faster way (bfloat16: 0.4 of the other's time for 2, 0.9 for 16)."""


def single_rows(tables: Tensor, lens: Tensor, cache: LayerPages, group: int) -> SingleRows | FusedPages:
    """The faster way for a step's rows; in float32 the two are near each other."""
    is_fused = cache.keys.dtype is not torch.float32 and 0 < tables.numel() <= FUSED_PAGES
    if is_fused:
        return FusedPages(tables, lens, cache)
    return SingleRows(tables, lens, cache, group, group, keys_first=cache.keys.dtype is not torch.float32)


class PageRun:
    """The pages of a step's rows as one run, whose they are, and the way from its order to that of the rows.

    `owner` and `column` [count]: the row of each page of the run, and which of its pages it is; pages of nobody count
    as the first of row 0, and what comes of them is never brought back. `page_at` [rows, width] is the way back,
    `wanted` [rows, width] where a row has a page at all: elsewhere `page_at` gives its first one, never one that may
    hold another's NaN.
    """

    def __init__(self, tables: Tensor, lens: Tensor, cache: LayerPages, multiple: int) -> None:
        rows, width = tables.shape
        size = cache.block_size
        num_pages = (lens + size - 1) // size
        self.wanted = torch.arange(width) < num_pages[:, None]
        pages = tables[self.wanted]
        row_of, column_of = self.wanted.nonzero(as_tuple=True)
        first, count = _run_in_place(pages, cache.num_pages, multiple)
        if count:
            self._run: slice | Tensor = slice(first, first + count)
            place = pages - first
        else:
            self._run, count = pages, pages.shape[0]
            place = torch.arange(count)
        self.count = count
        self.owner = torch.zeros(count, dtype=torch.int64).index_copy_(0, place, row_of)
        self.column = torch.zeros(count, dtype=torch.int64).index_copy_(0, place, column_of)
        page_at = torch.zeros(rows, width, dtype=torch.int64)
        page_at[self.wanted] = place
        self.page_at = torch.where(self.wanted, page_at, page_at[:, :1])

    def of(self, pages: Tensor) -> Tensor:
        """The run of `pages`, keys or values of a layer: [count, kv_heads, block_size, head_dim]."""
        return pages[self._run] if isinstance(self._run, slice) else pages.index_select(0, self._run)


class SingleRows:
    """`tables` [rows, width] padded with scratch, `lens` [rows]: visible tokens. Both are of one step.

    `group` query rows share a KV head; they are multiplied as `padded_group` rows. `keys_first` multiplies keys by
    queries instead: of two bfloat16 factors the library puts the second into another order, and queries are fewer.
    """

    def __init__(
        self,
        tables: Tensor,
        lens: Tensor,
        cache: LayerPages,
        group: int,
        padded_group: int,
        *,
        keys_first: bool = False,
    ) -> None:
        rows, width = tables.shape
        size, kv_heads = cache.block_size, cache.keys.shape[1]
        heads = kv_heads * group
        self._run = run = PageRun(tables, lens, cache, 1 if cache.keys.dtype is torch.float32 else RUN_MULTIPLE)
        self._rows, self._width, self._heads = rows, width, heads
        self._group, self._padded_group = group, padded_group
        self._keys_first = keys_first
        # Rows of [pages * kv_heads * padded_group, block_size] in the order [row, head, column], and the way back, on
        # which padding takes the weights of head 0: its mix is dropped. A missing column has a weight of exactly 0, its
        # mix is left out.
        head = torch.arange(heads)
        padded_heads = kv_heads * padded_group
        place_of_head = head // group * padded_group + head % group
        head_at_place = torch.zeros(padded_heads, dtype=torch.int64).index_copy_(0, place_of_head, head)
        self._to_rows = (run.page_at[:, None, :] * padded_heads + place_of_head[:, None]).flatten()
        self._to_pages = ((run.owner[:, None] * heads + head_at_place) * width + run.column[:, None]).flatten()
        visible = torch.arange(width * size) < lens[:, None]
        self._mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None, :]
        self._missing = None if bool(run.wanted.all()) else ~run.wanted.t()[:, :, None]
        self._columns = run.page_at.t().contiguous()

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        """`q` [rows, kv_heads, group, head_dim], scaled; the same shape back."""
        kv_heads, size, head_dim = cache.keys.shape[1:]
        count, group = self._run.count, self._padded_group
        batch = count * kv_heads
        if group != self._group:
            q = F.pad(q, (0, 0, 0, group - self._group))
        keys, values = (self._run.of(pages).view(batch, size, head_dim) for pages in (cache.keys, cache.values))
        queries = q.reshape(self._rows, -1).index_select(0, self._run.owner).view(batch, group, head_dim)
        scores = self._scores(queries, keys).view(-1, size).index_select(0, self._to_rows)
        scores = scores.view(self._rows, self._heads, -1).float()
        weights = torch.softmax(scores.add_(self._mask), dim=-1).to(q.dtype)
        by_page = weights.view(-1, size).index_select(0, self._to_pages).view(batch, group, size)
        mixes = torch.bmm(by_page, values)[:, : self._group].reshape(count, -1)
        return self._add_in_order(mixes).view(self._rows, kv_heads, self._group, head_dim)

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        if self._keys_first:
            return torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2).contiguous()
        return torch.bmm(queries, keys.transpose(1, 2))

    def _add_in_order(self, mixes: Tensor) -> Tensor:
        """The mixes of each row's pages, added first page to last: [rows, heads * head_dim]."""
        total = mixes.index_select(0, self._columns[0])
        for column in range(1, self._width):
            mix = mixes.index_select(0, self._columns[column])
            if self._missing is not None:
                mix = mix.masked_fill_(self._missing[column], 0.0)
            total += mix
        return total


class FusedPages:
    """What `SingleRows` computes, by the library's fused kernel page by page: fewer calls, each page at more cost.

    The kernel gives the softmax's sum of each page too (its logarithm), by which the pages of a row are weighted.
    `tables` and `lens` are those of `SingleRows`.
    """

    def __init__(self, tables: Tensor, lens: Tensor, cache: LayerPages) -> None:
        size = cache.block_size
        self._run = run = PageRun(tables, lens, cache, 1)
        ends = lens[run.owner] - run.column * size
        hidden = torch.arange(size) >= ends[:, None]
        self._mask = torch.zeros(hidden.shape, dtype=cache.keys.dtype).masked_fill_(hidden, float("-inf"))
        self._mask = self._mask[:, None, None, :]
        self._to_rows = run.page_at.flatten()
        self._missing = torch.zeros(tables.shape).masked_fill_(~run.wanted, float("-inf"))[:, :, None, None]

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        """`q` [rows, kv_heads, group, head_dim], scaled; the same shape back."""
        rows = q.shape[0]
        mixes, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.index_select(0, self._run.owner),
            self._run.of(cache.keys),
            self._run.of(cache.values),
            attn_mask=self._mask,
            scale=1.0,
        )
        sums = sums.index_select(0, self._to_rows).view(rows, -1, *q.shape[1:3])
        weights = torch.softmax(sums + self._missing, dim=1)[..., None]
        by_row: Tensor = mixes.index_select(0, self._to_rows).view(rows, -1, *q.shape[1:])
        return (by_row * weights).sum(1).to(q.dtype)


def _run_in_place(pages: Tensor, num_pages: int, multiple: int) -> tuple[int, int]:
    """First page and number of pages of the run that covers `pages`; 0 pages where a copy is the better way."""
    if not pages.shape[0]:
        return 0, 1
    first, last = int(pages.min()), int(pages.max())
    count = min(-(-(last + 1 - first) // multiple) * multiple, num_pages)
    first = min(first, num_pages - count)
    is_shared = len(set(pages.tolist())) < pages.shape[0]
    return (0, 0) if is_shared or count > WASTE_LIMIT * pages.shape[0] + multiple else (first, count)

"""Paged attention equals the textbook formula, wherever the pages lie and whoever shares them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpu_engine.device.base import AttentionShape
from hpu_engine.device.cpu.attention import AttentionStep, ExactAttention
from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.device.cpu.single_attention import FusedPages, SingleRows
from hpu_engine.device.cpu.torch_ops import TORCH_OPS, CpuOps, Singles, TorchOps
from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Row, Step
from tests.engine.rows import batch_of

BLOCK, PAGES, KV_HEADS, GROUP, DIM = 4, 60, 2, 3, 8
SHAPE = AttentionShape(KV_HEADS * GROUP, KV_HEADS, DIM, DIM**-0.5)


class FusedOps(TorchOps):
    def singles(self, tables: Tensor, lens: Tensor, cache: LayerPages, group: int) -> Singles:
        return FusedPages(tables, lens, cache) if tables.numel() else super().singles(tables, lens, cache, group)


class KeysFirstOps(TorchOps):
    def singles(self, tables: Tensor, lens: Tensor, cache: LayerPages, group: int) -> Singles:
        return SingleRows(tables, lens, cache, group, group, keys_first=True)


WAYS = [TORCH_OPS, KeysFirstOps(), FusedOps()]
WAY_NAMES = ["queries-first", "keys-first", "fused"]


def textbook(q: Tensor, keys: Tensor, values: Tensor, context_len: int) -> Tensor:
    """q [new, heads, dim]; keys, values [context + new, kv_heads, dim], all of one row."""
    keys, values = (x.double().repeat_interleave(GROUP, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * SHAPE.scale
    positions = torch.arange(context_len, context_len + q.shape[0])
    scores.masked_fill_(torch.arange(keys.shape[0]) > positions[:, None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(q.shape[0], -1)


def check(rows: list[tuple[int, int]], tables: list[list[int]], exact: bool, ops: CpuOps = TORCH_OPS) -> None:
    """`rows` are (context_len, new_len); every table holds enough pages for its row."""
    step_rows = []
    for (context_len, new_len), table in zip(rows, tables, strict=True):
        request = Request("r", [1] * (context_len + new_len), SamplingParams(), seed=0)
        request.blocks = table
        step_rows.append(Row(request, context_len, new_len, emits=True))
    batch = batch_of(Step(tuple(step_rows)), BLOCK)
    generator = torch.Generator().manual_seed(len(rows) + sum(map(sum, rows)))
    page_shape = (PAGES, KV_HEADS, BLOCK, DIM)
    cache = LayerPages(torch.randn(page_shape, generator=generator), torch.randn(page_shape, generator=generator))
    q = torch.randn(batch.num_tokens, KV_HEADS * GROUP, DIM, generator=generator)
    keys, values = (torch.randn(batch.num_tokens, KV_HEADS, DIM, generator=generator) for _ in range(2))
    attention = AttentionStep(SHAPE, batch, cache, torch.float32, ExactAttention(4, 8) if exact else None, ops=ops)
    attention.write(cache, keys, values)
    mixed = attention.attend(q, cache)
    # The batch lays chunks before singles; each row's tokens are found by its slots.
    start = 0
    for row in sorted(step_rows, key=lambda row: row.new_len == 1):
        end, length = start + row.new_len, row.context_len + row.new_len
        slots = [row.request.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)]
        own_keys, own_values = (
            torch.stack([pages[slot // BLOCK, :, slot % BLOCK] for slot in slots])
            for pages in (cache.keys, cache.values)
        )
        torch.testing.assert_close(own_keys[row.context_len :], keys[start:end])
        expected = textbook(q[start:end], own_keys, own_values, row.context_len)
        torch.testing.assert_close(mixed[start:end].double(), expected, atol=1e-5, rtol=1e-5)
        start = end


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 18), st.sampled_from([1, 1, 1, 2, 5, 9])), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    exact=st.booleans(),
    ops=st.sampled_from(WAYS),
)
def test_any_mixture_of_rows_equals_the_textbook(
    rows: list[tuple[int, int]], order: object, exact: bool, ops: CpuOps
) -> None:
    pages = list(range(1, PAGES))
    order.shuffle(pages)  # type: ignore[attr-defined]
    tables = [[pages.pop() for _ in range(-(-(context + new) // BLOCK))] for context, new in rows]
    check(rows, tables, exact, ops)


@pytest.mark.parametrize("ops", WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize(
    "tables",
    [
        pytest.param([[1, 2, 3], [4, 5], [6]], id="dense-run"),
        pytest.param([[50, 51, 52], [53, 54], [55]], id="run-at-the-end-of-the-pool"),
        pytest.param([[3, 2, 1], [6, 4], [5]], id="pages-out-of-order"),
        pytest.param([[1, 30, 59], [15, 44], [58]], id="scattered"),
        pytest.param([[1, 2, 3], [1, 4], [5]], id="first-page-shared"),
    ],
)
def test_singles_wherever_their_pages_lie(tables: list[list[int]], ops: CpuOps) -> None:
    check([(9, 1), (5, 1), (2, 1)], tables, exact=False, ops=ops)


def test_no_rows_at_all_is_legal() -> None:
    cache = LayerPages(torch.zeros(3, KV_HEADS, BLOCK, DIM), torch.zeros(3, KV_HEADS, BLOCK, DIM))
    attention = AttentionStep(SHAPE, batch_of(Step(()), BLOCK), cache, torch.float32, None, ops=TORCH_OPS)
    attention.write(cache, torch.zeros(0, KV_HEADS, DIM), torch.zeros(0, KV_HEADS, DIM))
    assert attention.attend(torch.zeros(0, KV_HEADS * GROUP, DIM), cache).shape == (0, KV_HEADS * GROUP * DIM)


@pytest.mark.parametrize("ops", WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_reads_no_page_of_another(exact: bool, dtype: torch.dtype, ops: CpuOps) -> None:
    """The first row's numbers are broken, and so are those of pages that nobody has now."""
    long, short = (Request(name, [1] * 10, SamplingParams(), seed=0) for name in ("long", "short"))
    long.blocks, short.blocks = [2, 3, 5], [4]
    batch = batch_of(Step((Row(long, 9, 1, emits=True), Row(short, 2, 1, emits=True))), BLOCK)
    generator = torch.Generator().manual_seed(0)
    cache = LayerPages(*(torch.randn(PAGES, KV_HEADS, BLOCK, DIM, generator=generator).to(dtype) for _ in range(2)))
    q = torch.randn(2, KV_HEADS * GROUP, DIM, generator=generator).to(dtype)
    attention = AttentionStep(SHAPE, batch, cache, dtype, ExactAttention(4, 8) if exact else None, ops=ops)
    whole = attention.attend(q, cache)
    for pages in (cache.keys, cache.values):
        pages[torch.arange(PAGES) != 4] = float("nan")
    broken = attention.attend(q, cache)
    assert broken[0].isnan().all()
    assert torch.equal(broken[1], whole[1])

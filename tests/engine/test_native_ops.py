"""The compiled kernels compute what torch's operators do, and every row alike whatever stands beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hpu_engine.device.base import HeadNorms, Turn
from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.device.cpu.native.build import default_cache, load_library
from hpu_engine.device.cpu.native.ops import NativeOps
from hpu_engine.device.cpu.torch_ops import TORCH_OPS, CpuOps
from tests.engine.test_attention import BLOCK, PAGES, check


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(load_library(default_cache(), pytest.fail))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("narrow", [True, False], ids=["bfloat16-weights", "float32-weights"])
@pytest.mark.parametrize(("out", "width"), [(96, 64), (33, 70), (7, 1537), (960, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_is_the_product_and_treats_all_row_counts_alike(
    ops: NativeOps, out: int, width: int, narrow: bool, biased: bool
) -> None:
    weight = random(out, width) * 0.05
    if narrow:
        weight = weight.bfloat16().float()
    bias = random(out, seed=1) if biased else None
    linear = ops.linear(weight, bias)
    x = random(211, width, seed=2)
    whole = linear(x)
    torch.testing.assert_close(whole, F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
    for count in (0, 1, 2, 3, 5, 6, 7, 11, 12, 13, 64, 210):
        assert torch.equal(linear(x[:count]), whole[:count]), count
    assert torch.equal(linear(x[100:101]), whole[100:101])
    torch.set_num_threads(2)
    try:
        assert torch.equal(linear(x), whole), "the number of threads changes bits"
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("width", [8, 100, 576])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_a_norm_is_torchs_with_the_sum_before_it(ops: NativeOps, rows: int, width: int) -> None:
    x, delta, weight = random(rows, width), random(rows, width, seed=1), random(width, seed=2)
    for more in (None, delta):
        total, normed = ops.add_norm(x, more, weight, 1e-5)
        expected_total, expected = TORCH_OPS.add_norm(x, more, weight, 1e-5)
        assert torch.equal(total, expected_total)
        torch.testing.assert_close(normed, expected, atol=1e-5, rtol=1e-5)


def test_a_gate_is_torchs_at_every_magnitude(ops: NativeOps) -> None:
    gate = torch.cat(
        (random(3, 3000) * 3, torch.logspace(-30, 30, 9000).view(3, -1), -torch.logspace(-30, 30, 9003).view(3, -1)), 1
    )
    up = random(*gate.shape, seed=1)
    both = torch.cat((gate, up), 1)
    torch.testing.assert_close(ops.silu_mul(both), TORCH_OPS.silu_mul(both), atol=1e-30, rtol=3e-6, equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_a_rotation_is_torchs_and_keys_and_values_reach_their_slots(
    ops: NativeOps, interleaved: bool, normed: bool
) -> None:
    tokens, heads, kv_heads, dim = 5, 6, 2, 16
    qkv = random(tokens, heads + 2 * kv_heads, dim)
    angles = random(tokens, 1, dim, seed=1)
    turn = Turn(angles.cos(), angles.sin(), interleaved)
    norms = HeadNorms(random(dim, seed=2), random(dim, seed=3), 1e-6) if normed else None
    slots = torch.tensor([3, 9, 4, 15, 0])
    caches = [LayerPages(torch.zeros(4, kv_heads, 4, dim), torch.zeros(4, kv_heads, 4, dim)) for _ in range(2)]
    queries = []
    each: tuple[CpuOps, CpuOps] = (ops, TORCH_OPS)
    for own, cache in zip(each, caches, strict=True):
        q, keys, values = own.rotate(qkv, heads, norms, turn)
        own.write(cache, cache.slot_rows(slots), keys, values)
        queries.append(q)
    torch.testing.assert_close(queries[0], queries[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(caches[0].keys, caches[1].keys, atol=1e-5, rtol=1e-5)
    assert torch.equal(caches[0].values, caches[1].values)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 18), st.sampled_from([1, 1, 1, 2, 5])), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_attention_of_any_mixture_of_rows_equals_the_textbook(
    ops: NativeOps, rows: list[tuple[int, int]], order: object
) -> None:
    pages = list(range(1, PAGES))
    order.shuffle(pages)  # type: ignore[attr-defined]
    tables = [[pages.pop() for _ in range(-(-(context + new) // BLOCK))] for context, new in rows]
    check(rows, tables, exact=False, ops=ops)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dim", [8, 40, 64, 128])
@pytest.mark.parametrize("length", [1, 7, 128, 129, 300])
def test_a_row_attends_alike_alone_and_among_others(ops: NativeOps, group: int, dim: int, length: int) -> None:
    kv_heads, block = 2, 128
    cache = LayerPages(random(9, kv_heads, block, dim), random(9, kv_heads, block, dim, seed=1))
    tables = torch.tensor([[3, 1, 5], [2, 0, 0], [8, 7, 6]])
    lens = torch.tensor([length, 100, 257])
    q = random(3, kv_heads, group, dim, seed=2) * dim**-0.5
    together = ops.singles(tables, lens, cache, group).attend(q, cache)
    for row in range(3):
        alone = ops.singles(tables[row : row + 1], lens[row : row + 1], cache, group).attend(q[row : row + 1], cache)
        assert torch.equal(alone[0], together[row])
    keys, values = (
        pages[tables[0]].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :length] for pages in (cache.keys, cache.values)
    )
    expected = torch.softmax(q[0].double() @ keys.double().transpose(1, 2), -1) @ values.double()
    torch.testing.assert_close(together[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_callers_at_once_and_changing_numbers_of_threads_get_the_same_bits(ops: NativeOps) -> None:
    """Helpers come late, not at all, or are busy with another caller's work."""
    linear, x = ops.linear(random(960, 576) * 0.05, None), random(64, 576, seed=1)
    expected = linear(x)

    def calls(threads: int) -> bool:
        torch.set_num_threads(threads)
        return all(torch.equal(linear(x), expected) for _ in range(100))

    try:
        with ThreadPoolExecutor(4) as callers:
            assert all(callers.map(calls, (1, 2, 3, 8) * 2))
    finally:
        torch.set_num_threads(1)


def test_the_work_is_shared_out_among_as_many_threads_as_are_set(ops: NativeOps) -> None:
    """In a process of its own: this one may have helpers already."""
    program = """
import os, pathlib, time, torch
from hpu_engine.device.cpu.native.build import default_cache, load_library
from hpu_engine.device.cpu.native.ops import NativeOps

def ticks():  # of processor time in user mode, by thread
    stats = pathlib.Path("/proc/self/task").glob("*/stat")
    return {int(stat.parent.name): int(stat.read_text().rpartition(")")[2].split()[11]) for stat in stats}

linear = NativeOps(load_library(default_cache(), print)).linear(torch.randn(3072, 576), None)
x, ends = torch.randn(64, 576), time.monotonic() + 60
helpers = []
for threads in (1, 2):
    torch.set_num_threads(threads)
    before, own = ticks(), 0
    while own < 30 or (threads == 2 and not helpers and time.monotonic() < ends):
        linear(x)
        now = ticks()
        own = now[os.getpid()] - before[os.getpid()]
        helpers = [thread for thread in now if thread != os.getpid() and now[thread] - before.get(thread, 0) >= 10]
    assert len(helpers) == threads - 1, (threads, before, now)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_forked_process_has_helpers_of_its_own(ops: NativeOps) -> None:
    linear, x = ops.linear(random(960, 576) * 0.05, None), random(64, 576, seed=1)
    torch.set_num_threads(2)
    try:
        expected = linear(x).numpy().tobytes()  # torch's own threads do not survive in the child
        child = os.fork()
        if not child:
            os._exit(0 if all(linear(x).numpy().tobytes() == expected for _ in range(20)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(1)

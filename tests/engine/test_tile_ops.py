"""The kernels for AMX tiles compute what float64 does with the same bfloat16 operands, and every row alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.device.cpu.native.tile_ops import TileOps
from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Row, Step
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.worker.start_up import Rank
from tests.engine.direct import open_quietly
from tests.engine.rows import run_step
from tests.engine.test_greedy_parity import reference_of
from tests.models.smollm2 import smollm2
from tests.models.tiny import tiny

BLOCK, KV_HEADS = 128, 2
TABLES = torch.tensor([[3, 1, 5], [2, 0, 0], [8, 7, 6]])


@pytest.fixture
def ops(tile_ops: TileOps) -> TileOps:
    return tile_ops


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def cache_of(dim: int, pages: int = 9) -> LayerPages:
    return LayerPages(*(random(pages, KV_HEADS, BLOCK, dim, seed=seed).bfloat16() for seed in (1, 2)))


def textbook(q: Tensor, cache: LayerPages, table: Tensor, context_len: int) -> Tensor:
    """`q` [new, heads, dim], scaled; [new, heads, dim]."""
    new, heads, dim = q.shape
    keys, values = (
        torch.cat([pages[block] for block in table], 1)[:, : context_len + new].double()
        for pages in (cache.keys, cache.values)
    )
    queries = rounded(q).view(new, KV_HEADS, -1, dim).permute(1, 2, 0, 3)
    scores = queries @ keys[:, None].transpose(2, 3)
    hidden = torch.arange(context_len + new) > torch.arange(context_len, context_len + new)[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values[:, None]).permute(2, 0, 1, 3).reshape(new, heads, dim)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("out", "width"), [(960, 576), (33, 70), (7, 1537), (1000, 32)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_is_the_product_of_rounded_operands_and_treats_all_row_counts_alike(
    ops: TileOps, out: int, width: int, biased: bool
) -> None:
    weight = (random(out, width) * 0.05).bfloat16().float()
    bias = random(out, seed=1) if biased else None
    linear, x = ops.linear(weight, bias), random(211, width, seed=2)
    whole = linear(x)
    expected = rounded(x) @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=1e-5)
    for count in (0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 210):
        assert torch.equal(linear(x[:count]), whole[:count]), count
    assert torch.equal(linear(x[100:101]), whole[100:101])


def test_what_may_not_be_rounded_is_not(ops: TileOps) -> None:
    """A router's activations, and weights with more digits than bfloat16 has."""
    x, wide = random(40, 64), random(8, 64, seed=1)
    for weight, linear in (
        (wide.bfloat16().float(), ops.linear(wide.bfloat16().float(), None, rounds=False)),
        (wide, ops.linear(wide, None)),
    ):
        torch.testing.assert_close(linear(x).double(), x.double() @ weight.double().T, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("group", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_single_rows_attend_as_the_textbook_does_alone_and_among_others(ops: TileOps, group: int, dim: int) -> None:
    cache, lens = cache_of(dim), torch.tensor([300, 1, 257])
    q = random(3, KV_HEADS, group, dim, seed=3) * dim**-0.5
    together = ops.singles(TABLES, lens, cache, group).attend(q, cache)
    for row, length in enumerate(lens.tolist()):
        expected = textbook(q[row].reshape(1, -1, dim), cache, TABLES[row], length - 1)
        torch.testing.assert_close(together[row].double().reshape(1, -1, dim), expected, atol=1e-4, rtol=1e-4)
        own = slice(row, row + 1)
        assert torch.equal(ops.singles(TABLES[own], lens[own], cache, group).attend(q[own], cache), together[own])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize(("context_len", "new_len"), [(0, 2), (0, 300), (3, 5), (127, 2), (128, 129), (250, 130)])
def test_a_chunk_attends_as_the_textbook_does_however_it_is_cut(
    ops: TileOps, group: int, dim: int, context_len: int, new_len: int
) -> None:
    cache, table, scale = cache_of(dim), TABLES[0], dim**-0.5
    q = random(new_len, KV_HEADS * group, dim, seed=3)
    whole = ops.chunk(table, context_len, new_len, scale).attend(q, cache)
    expected = textbook(q * scale, cache, table, context_len).reshape(new_len, -1)
    torch.testing.assert_close(whole.double(), expected, atol=0.02, rtol=0.02)  # weights are rounded to bfloat16
    assert (whole.double() - expected).abs().mean() < 1e-3
    cut = new_len // 2
    first = ops.chunk(table, context_len, cut, scale).attend(q[:cut], cache)
    second = ops.chunk(table, context_len + cut, new_len - cut, scale).attend(q[cut:], cache)
    assert torch.equal(torch.cat((first, second)), whole)


def test_pages_of_others_and_slots_behind_the_last_token_are_not_read(ops: TileOps) -> None:
    whole, poisoned, length, dim = cache_of(64), cache_of(64), 200, 64
    for pages in (poisoned.keys, poisoned.values):
        pages[torch.tensor([0, 2, 4, 5, 6, 7, 8])] = float("nan")
        pages[1, :, length - BLOCK :] = float("nan")
    q, lens = random(1, KV_HEADS, 3, dim), torch.tensor([length])
    chunk = random(50, KV_HEADS * 3, dim)
    for kernel, queries in (
        (ops.singles(TABLES[:1], lens, whole, 3), q),
        (ops.chunk(TABLES[0], length - 50, 50, 0.125), chunk),
    ):
        assert torch.equal(kernel.attend(queries, poisoned), kernel.attend(queries, whole))


def test_a_broken_number_of_a_row_stays_in_it(ops: TileOps) -> None:
    linear, x = ops.linear(random(64, 64).bfloat16().float(), None), random(20, 64)
    expected = linear(x)
    x[3, 5] = float("nan")
    found = linear(x)
    assert found[3].isnan().all()
    assert torch.equal(found[torch.arange(20) != 3], expected[torch.arange(20) != 3])
    cache, lens = cache_of(64), torch.tensor([300, 100, 257])
    q = random(3, KV_HEADS, 3, 64)
    singles = ops.singles(TABLES, lens, cache, 3)
    expected = singles.attend(q, cache)
    cache.keys[2, 0, 7, 3] = float("nan")
    found = singles.attend(q, cache)
    assert found[1, 0].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_keys_and_values_are_kept_as_bfloat16(ops: TileOps) -> None:
    cache = LayerPages(*(torch.zeros(4, KV_HEADS, 4, 32, dtype=torch.bfloat16) for _ in range(2)))
    qkv, slots = random(5, 3 * KV_HEADS, 32), torch.tensor([3, 9, 4, 15, 0])
    keys, values = qkv[:, KV_HEADS : 2 * KV_HEADS].contiguous(), qkv[:, 2 * KV_HEADS :]
    ops.write(cache, cache.slot_rows(slots), keys, values)
    for pages, new in ((cache.keys, keys), (cache.values, values)):
        for token, slot in enumerate(slots.tolist()):
            assert torch.equal(pages[slot // 4, :, slot % 4], new[token].bfloat16())


def test_what_torch_multiplies_on_tiles_is_right_before_and_after(ops: TileOps) -> None:
    """Both set up the tiles of the same thread, and torch's library remembers what it loaded last."""
    linear, x = ops.linear((random(96, 64) * 0.1).bfloat16().float(), None), random(64, 64)
    left, right = random(64, 96).bfloat16(), random(96, 80).bfloat16()
    product, own = left @ right, linear(x)
    for _ in range(3):
        assert torch.equal(left @ right, product)
        assert torch.equal(linear(x), own)


def logits_of(rank: Rank, tokens: list[int], first: int) -> Tensor:
    """Logits [tokens - first + 1, vocab] behind the `first` tokens, a chunk, and behind each later one alone."""
    request = Request("r", tokens, SamplingParams(), seed=0)
    request.blocks = [2, 4]
    rows = [Row(request, 0, first, emits=True)]
    rows += [Row(request, number, 1, emits=True) for number in range(first, len(tokens))]
    return torch.cat([run_step(rank.runner, Step((row,))) for row in rows])


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("family", ["smollm2", "llama", "qwen2", "qwen3", "ernie4_5"])
def test_logits_are_nearer_to_float32_than_transformers_own_in_bfloat16(family: str) -> None:
    """Activations between the products keep float32, so less is rounded than where everything is bfloat16."""
    from transformers import AutoModelForCausalLM

    path = str(smollm2() if family == "smollm2" else tiny(family, dtype="bfloat16", head_dim=32))
    tokens = [3 + (11 * i) % 300 for i in range(150)]
    rank = open_quietly(EngineConfig(model=path, num_kv_blocks=8, compile=True))
    assert rank.loaded.dtype == "bfloat16"
    found = logits_of(rank, tokens, first=100)
    with torch.inference_mode():
        wide = reference_of(path)(torch.tensor([tokens])).logits[0, 99:].float()
        narrow = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        theirs = narrow(torch.tensor([tokens])).logits[0, 99:].float()
    ours_off, theirs_off = ((some - wide).abs().mean() for some in (found, theirs))
    print(f"{family}: off by {ours_off:.4f}, transformers by {theirs_off:.4f}")
    assert ours_off < theirs_off


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "ernie4_5_moe"])
def test_a_mixture_of_experts_chooses_as_in_float32(family: str) -> None:
    """Experts multiply rounded activations, the router does not: no row goes elsewhere."""
    path = str(tiny(family, dtype="bfloat16", head_dim=32))
    x = random(200, 64)
    found, wide = (
        open_quietly(EngineConfig(model=path, dtype=dtype, num_kv_blocks=8, compile=True))
        .runner.transformer.layers[-1]
        .mlp(x)
        for dtype in ("bfloat16", "float32")
    )
    off = (found - wide).abs().amax(-1) / wide.abs().amax(-1)
    assert 0 < off.max() < 0.05


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("more", [{"exact": True}, {"force_buckets": True}, {"block_size": 24}, {"dtype": "float32"}])
def test_what_they_are_not_made_for_is_computed_in_float32(more: dict[str, object]) -> None:
    settings = {"num_kv_blocks": 8, "compile": True, "block_size": 32, **more}
    path = str(tiny("llama", dtype="bfloat16", head_dim=32))
    assert open_quietly(EngineConfig(model=path, **settings)).loaded.dtype == "float32"  # type: ignore[arg-type]

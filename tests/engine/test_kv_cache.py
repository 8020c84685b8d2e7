"""The KV cache takes memory as it is used, not as it is allowed."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from hpu_engine.device.cpu.kv_cache import allocate_kv_cache

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of this tensor alone, in whole pages: what else this process does meanwhile does not count (mincore(2))."""
    start = tensor.data_ptr() // PAGE * PAGE
    length = tensor.data_ptr() + tensor.nbytes - start
    pages = (ctypes.c_ubyte * -(-length // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages) * PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_nobody_wrote_is_zero_and_takes_no_memory(dtype: torch.dtype) -> None:
    layers, kv_heads, size, dim = 2, 2, 128, 16
    page = 2 * layers * kv_heads * size * dim * dtype.itemsize
    pages = (512 << 20) // page
    caches = allocate_kv_cache(
        layers=layers, pages=pages, kv_heads=kv_heads, block_size=size, head_dim=dim, dtype=dtype
    )
    tensors = [tensor for cache in caches for tensor in (cache.keys, cache.values)]
    assert sum(tensor.nbytes for tensor in tensors) == pages * page
    assert sum(map(resident_bytes, tensors)) < 32 << 20
    assert caches[0].keys.dtype == dtype
    assert not caches[-1].values[pages - 1].any()
    caches[0].keys.fill_(1.0)
    assert resident_bytes(caches[0].keys) >= caches[0].keys.nbytes, "what is written is seen to take memory"

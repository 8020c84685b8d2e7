"""The KV cache takes memory as it is used, not as it is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpu_engine.model.kv_cache import allocate_kv_cache, kv_block_bytes
from hpu_engine.planning.model import read_model_description
from tests.models.tiny import tiny


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_nobody_wrote_is_zero_and_takes_no_memory(dtype: torch.dtype) -> None:
    description = read_model_description(tiny("llama"))
    block = kv_block_bytes(description, 128, dtype)
    num_blocks = (512 << 20) // block
    before = resident_bytes()
    caches = allocate_kv_cache(description, num_blocks, 128, dtype)
    assert sum(cache.keys.nbytes + cache.values.nbytes for cache in caches) == (num_blocks + 1) * block
    assert resident_bytes() - before < 32 << 20
    assert caches[0].keys.dtype == dtype
    assert not caches[-1].values[num_blocks].any()

"""The CPU device: real answers without a card.

Types are settled by `planning`: a processor without fast bfloat16 products computes everything in float32, with weights
of half the bytes where that loses no digit. Kernels of linears are chosen by speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from hpu_engine.device.base import (
    AttentionShape,
    Device,
    ExpertKernel,
    LayerCache,
    Linear,
    LinearWeights,
    StepAttention,
    WarmUpShape,
)
from hpu_engine.device.cpu.attention import AttentionStep, ExactAttention
from hpu_engine.device.cpu.exact_rows import ExactLinear, RowClass, find_group_rows, find_row_class
from hpu_engine.device.cpu.expert_kernels import silu_mul, sorted_kernel, static_kernel
from hpu_engine.device.cpu.kv_cache import LayerPages, allocate_kv_cache
from hpu_engine.device.cpu.linear_kernels import LinearKernels, PlainLinear, packed
from hpu_engine.device.cpu.native.ops import NativeOps
from hpu_engine.device.cpu.padded_attention import PaddedAttentionStep
from hpu_engine.device.cpu.torch_ops import CpuOps, TorchOps
from hpu_engine.step.batch import Batch
from hpu_engine.step.padded_batch import PaddedBatch

_LinearKey = tuple[torch.dtype, int, int]
"""Type, rows and columns of a weight: linears of one key are treated alike."""

ROWS_OF_ONE_THREAD = 4
"""Up to so many tokens a second thread is not worth being woken for every operation (SmolLM2 over HTTP on a Zen 3, one
request on two cores: 22 to 24 tokens/s with one thread, 14 to 15 with two). A linear that waits for memory longer than
that takes, on a processor whose threads each get a part of it only, still calls all of them.
"""


EXACT_CHUNK_TOKENS = 32
"""Tokens of a chunk that exact attention takes at a time."""


class CpuDevice(Device):
    name = "cpu"
    where = torch.device("cpu")

    def __init__(self, *, exact: bool = False, static_shapes: bool = False, native: NativeOps | None = None) -> None:
        """`static_shapes`: nothing of a step may branch on its data, as on a device that compiles graphs.

        `native`: kernels compiled for this processor, with activations in float32, which treat all row counts alike.
        """
        self._native = native
        self._exact = exact
        self._ops: CpuOps = native or TorchOps(_uncut_silu_mul if exact else silu_mul)
        self._exact_attention: dict[tuple[AttentionShape, int, torch.dtype], ExactAttention] = {}
        self._static_shapes = static_shapes
        self._kernels = LinearKernels()
        self._row_classes: dict[_LinearKey, RowClass] = {}

    @contextmanager
    def working_on(self, rows: int) -> Iterator[None]:
        """One thread for few tokens. Compiled kernels decide by themselves, exact ones must not differ by steps."""
        threads = torch.get_num_threads()
        if self._exact or self._native is not None or rows > ROWS_OF_ONE_THREAD or threads == 1:
            yield
            return
        with _one_thread():
            yield

    @property
    def ops(self) -> CpuOps:
        return self._ops

    def linear(self, weights: LinearWeights) -> Linear:
        weight, bias = weights.weight, weights.bias
        if self._native is not None:
            return self._native.linear(weight, bias, rounds=weights.rounds)
        return self._exact_linear(weight, bias) if self._exact else self._kernels.build(weight, bias)

    def _exact_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The choice of kernel is not measured here: it must be the same at every start."""
        key: _LinearKey = (weight.dtype, weight.shape[0], weight.shape[1])
        if key not in self._row_classes:
            no_bias = None if bias is None else torch.zeros_like(bias)
            self._row_classes[key] = find_row_class(
                lambda own: packed(own, no_bias) or PlainLinear(own, no_bias), (key[1], key[2]), key[0]
            )
        return ExactLinear(packed(weight, bias) or PlainLinear(weight, bias), self._row_classes[key])

    def experts(self, experts: Sequence[tuple[Linear, Linear]]) -> ExpertKernel:
        if self._static_shapes:
            return static_kernel(experts, self._ops.silu_mul)
        fused = None if self._native is None else self._native.experts(experts)
        return fused or sorted_kernel(experts, self._ops.silu_mul)

    def new_kv_cache(
        self, *, layers: int, pages: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[LayerPages, ...]:
        return allocate_kv_cache(
            layers=layers, pages=pages, kv_heads=kv_heads, block_size=block_size, head_dim=head_dim, dtype=dtype
        )

    def attention(
        self, shape: AttentionShape, batch: Batch | PaddedBatch, cache: LayerCache, dtype: torch.dtype
    ) -> StepAttention:
        assert isinstance(cache, LayerPages), "a cache of another device"
        exact = self._exactly(shape, cache.block_size, dtype) if self._exact else None
        if isinstance(batch, PaddedBatch):
            return PaddedAttentionStep(shape, batch, cache, dtype, exact)
        return AttentionStep(shape, batch, cache, dtype, exact, ops=self._ops)

    def _exactly(self, shape: AttentionShape, block_size: int, dtype: torch.dtype) -> ExactAttention:
        key = (shape, block_size, dtype)
        if key not in self._exact_attention:
            chunk_rows = EXACT_CHUNK_TOKENS * shape.group
            group_rows = find_group_rows(shape.group, chunk_rows, shape.head_dim, block_size, dtype)
            self._exact_attention[key] = ExactAttention(EXACT_CHUNK_TOKENS, group_rows)
        return self._exact_attention[key]

    def warm_up_shapes(self, *, max_batched_tokens: int, max_num_seqs: int, max_len: int) -> Iterator[WarmUpShape]:
        """A whole budget of prompt, prompt and decoding mixed, and decoding alone at a few widths."""
        longest = max_len - 1
        chunk = min(max_batched_tokens, longest)
        if chunk > 1:
            yield WarmUpShape(chunks=1, chunk_len=chunk, singles=0, context_len=0)
            decoding = min(max_num_seqs - 1, max_batched_tokens // 2)
            room = min(max_batched_tokens - decoding, longest)
            if decoding and room > 1:
                yield WarmUpShape(chunks=1, chunk_len=room, singles=decoding, context_len=0)
        singles = min(max_num_seqs, max_batched_tokens)
        while singles:
            yield WarmUpShape(chunks=0, chunk_len=0, singles=singles, context_len=min(longest, 255))
            singles //= 2

    def available_memory_bytes(self) -> int:
        return min(_host_available_bytes(), _cgroup_available_bytes())


def _uncut_silu_mul(gate_up: Tensor) -> Tensor:
    """Many elements are cut among threads, not at the ends of rows; the last ones before a cut go through instructions
    that round otherwise, and where the cuts fall depends on how many rows there are.
    """
    with _one_thread():
        return silu_mul(gate_up)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _host_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _cgroup_available_bytes() -> int:
    """Room below this container's limit (cgroup v2); without one, no bound."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        inactive = _inactive_file_bytes()
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else int(limit) - used + inactive


def _inactive_file_bytes() -> int:
    for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0

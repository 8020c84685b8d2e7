"""The compiled kernels of processors with AMX tiles: products and attention of bfloat16 operands with float32 sums.

What lies between them stays float32, keys and values are kept as bfloat16. A row's bits depend on that row alone here
too, but a row with one new token and one of a chunk are attended to by different kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CDLL

import torch
from torch import Tensor

from hpu_engine.device.base import ExpertKernel, Linear
from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.device.cpu.native.ops import COUNT, FLAG, POINTER, REAL, NativeOps, NativeSingles, declare
from hpu_engine.planning.settle import TILE_MULTIPLE

_ROWS, _DEPTH = 16, 32

_FORK_BYTES = 1_000_000
"""Weights, counted once for every 16 rows, from which a product is worth waking a second thread."""
_FORK_QUERIES = 16

_ARGUMENTS = {
    "hpu_pack_tiles": (POINTER, COUNT, COUNT, POINTER),
    "hpu_linear_tiles": (POINTER, COUNT, POINTER, POINTER, COUNT, COUNT, POINTER, FLAG),
    "hpu_mlp_tiles": (POINTER, COUNT, POINTER, POINTER, COUNT, COUNT, POINTER, FLAG),
    "hpu_experts_tiles": (POINTER, COUNT, *[POINTER] * 2, COUNT, *[POINTER] * 2, *[COUNT] * 3, POINTER, FLAG),
    "hpu_write_narrow": (POINTER, POINTER, *[COUNT] * 5, POINTER, POINTER, POINTER),
    "hpu_attend_singles_tiles": (*[POINTER] * 5, *[COUNT] * 6, POINTER, FLAG),
    "hpu_attend_chunk_tiles": (*[POINTER] * 4, *[COUNT] * 6, REAL, POINTER, FLAG),
}


def has_tiles(library: CDLL) -> bool:
    """Whether the processor has them and the kernel lets this process use them."""
    return bool(library.hpu_has_tiles())


class TileOps(NativeOps):
    def __init__(self, library: CDLL) -> None:
        super().__init__(library)
        assert has_tiles(library), "asking also opens the tiles to this process"
        declare(library, _ARGUMENTS)

    def linear(self, weight: Tensor, bias: Tensor | None, *, rounds: bool = True) -> Linear:
        """`weight` [out, in] float32, `bias` [out]; activations are rounded to bfloat16 on their way in if `rounds`."""
        narrow = weight.bfloat16().contiguous()
        if not rounds or not torch.equal(narrow.float(), weight):
            return super().linear(weight, bias)
        return TileLinear(self._library, narrow, bias)

    def mlp(self, gate_up: Linear, down: Linear) -> Linear | None:
        """Only of linears on tiles. What lies between them stays in the caches, rounded as `down` would round it."""
        halves = _halves(gate_up, down)
        return None if halves is None else TileMlp(self._library, *halves)

    def experts(self, experts: Sequence[tuple[Linear, Linear]]) -> ExpertKernel | None:
        """One call for all, rows sorted by expert; None where they are not of linears on tiles, all of one shape."""
        halves = [found for expert in experts if (found := _halves(*expert)) is not None]
        if len(halves) < len(experts) or len({(down.out, down.width) for _, down in halves}) != 1:
            return None
        return TileExperts(self._library, halves)

    def begin(self, cache: LayerPages, pages: Tensor) -> None:
        """Nothing: these kernels read no slot behind the last token."""

    def write(self, cache: LayerPages, slot_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        self._write(self._library.hpu_write_narrow, cache, slot_rows, keys, values)

    def singles(self, tables: Tensor, lens: Tensor, cache: LayerPages, group: int) -> NativeSingles:
        return NativeSingles(self._library.hpu_attend_singles_tiles, tables, lens)

    def chunk(self, blocks: Tensor, context_len: int, new_len: int, scale: float) -> TileChunk:
        return TileChunk(self._library, blocks, context_len, new_len, scale)


class TileLinear:
    """A linear on tiles. `packed` is what the kernels read."""

    def __init__(self, library: CDLL, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out, in] bfloat16."""
        self._run = library.hpu_linear_tiles
        self.out, self.width = weight.shape
        self.packed = torch.empty(_up_to(self.out, 2 * _ROWS) * _up_to(self.width, _DEPTH), dtype=torch.bfloat16)
        library.hpu_pack_tiles(weight.data_ptr(), self.out, self.width, self.packed.data_ptr())
        self.bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float().contiguous()
        rows = x.shape[0]
        y = x.new_empty(rows, self.out)
        bias_at = None if self.bias is None else self.bias.data_ptr()
        self._run(
            *(x.data_ptr(), rows, self.packed.data_ptr(), bias_at, self.out, self.width),
            *(y.data_ptr(), _threads(self.packed.nbytes, rows)),
        )
        return y


class TileMlp:
    """A gated MLP on tiles."""

    def __init__(self, library: CDLL, gate_up: TileLinear, down: TileLinear) -> None:
        self._run = library.hpu_mlp_tiles
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float().contiguous()
        y = torch.empty_like(x)
        rows, gate_up, down = x.shape[0], self._gate_up.packed, self._down
        self._run(
            *(x.data_ptr(), rows, gate_up.data_ptr(), down.packed.data_ptr(), down.out, down.width),
            *(y.data_ptr(), _threads(gate_up.nbytes, rows)),
        )
        return y


class TileExperts:
    """An `ExpertKernel` of gated MLPs on tiles, all of one shape."""

    def __init__(self, library: CDLL, experts: Sequence[tuple[TileLinear, TileLinear]]) -> None:
        self._run = library.hpu_experts_tiles
        self._experts = experts
        pointers = ctypes.c_void_p * len(experts)
        self._gate_up = pointers(*(gate_up.packed.data_ptr() for gate_up, _ in experts))
        self._down = pointers(*(down.packed.data_ptr() for _, down in experts))

    def __call__(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        hidden, weights = hidden.float().contiguous(), weights.float().contiguous()
        ids = ids.long().contiguous()
        rows, top_k = ids.shape
        total = torch.empty_like(hidden)
        gate_up, down = self._experts[0]
        self._run(
            *(hidden.data_ptr(), rows, ids.data_ptr(), weights.data_ptr(), top_k),
            *(self._gate_up, self._down, len(self._experts), down.out, down.width),
            *(total.data_ptr(), _threads(gate_up.packed.nbytes, rows * top_k)),
        )
        return total


class TileChunk:
    """Attention of one row with several new tokens."""

    def __init__(self, library: CDLL, blocks: Tensor, context_len: int, new_len: int, scale: float) -> None:
        self._run = library.hpu_attend_chunk_tiles
        self._blocks = blocks.contiguous()
        self._context_len, self._new_len, self._scale = context_len, new_len, scale
        self._threads = torch.get_num_threads() if new_len >= _FORK_QUERIES else 1

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        """`q` [new tokens, heads, head_dim] to [new tokens, heads * head_dim]."""
        q = q.contiguous()
        tokens, heads, dim = q.shape
        out = q.new_empty(tokens, heads * dim)
        _, kv_heads, block, _ = cache.keys.shape
        self._run(
            *(q.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr(), self._blocks.data_ptr()),
            *(self._new_len, self._context_len, heads, kv_heads, block, dim),
            *(self._scale, out.data_ptr(), self._threads),
        )
        return out


def _up_to(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _halves(gate_up: Linear, down: Linear) -> tuple[TileLinear, TileLinear] | None:
    """Both, where they are linears on tiles that make a gated MLP without biases."""
    if not isinstance(gate_up, TileLinear) or not isinstance(down, TileLinear):
        return None
    is_plain = gate_up.bias is None and down.bias is None and down.width % TILE_MULTIPLE == 0
    fits = (gate_up.out, gate_up.width) == (2 * down.width, down.out)
    return (gate_up, down) if is_plain and fits else None


def _threads(weight_bytes: int, rows: int) -> int:
    return torch.get_num_threads() if weight_bytes * -(-rows // _ROWS) >= _FORK_BYTES else 1

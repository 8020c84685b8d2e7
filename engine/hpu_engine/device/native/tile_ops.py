"""The compiled kernels of processors with AMX tiles: products and attention of bfloat16 operands with float32 sums.

What lies between them stays float32, keys and values are kept as bfloat16. A row's bits depend on that row alone here
too, but a row with one new token and one of a chunk are attended to by different kernels.
"""

from __future__ import annotations

from ctypes import CDLL

import torch
from torch import Tensor

from hpu_engine.device.base import Linear
from hpu_engine.device.native.ops import COUNT, FLAG, POINTER, REAL, NativeOps, NativeSingles, Pages, declare

_ROWS, _DEPTH = 16, 32
_MULTIPLE = 32
"""What the elements of a head and the tokens of a KV block have to be multiples of."""

_FORK_BYTES = 1_000_000
"""Weights from which a product is worth waking a second thread."""
_FORK_QUERIES = 16

_ARGUMENTS = {
    "hpu_pack_tiles": (POINTER, COUNT, COUNT, POINTER),
    "hpu_linear_tiles": (POINTER, COUNT, POINTER, POINTER, COUNT, COUNT, POINTER, FLAG),
    "hpu_write_narrow": (POINTER, POINTER, *[COUNT] * 5, POINTER, POINTER, POINTER),
    "hpu_attend_singles_tiles": (*[POINTER] * 5, *[COUNT] * 6, POINTER, FLAG),
    "hpu_attend_chunk_tiles": (*[POINTER] * 4, *[COUNT] * 6, REAL, POINTER, FLAG),
}


def has_tiles(library: CDLL) -> bool:
    """Whether the processor has them and the kernel lets this process use them."""
    return bool(library.hpu_has_tiles())


def takes_shapes(head_dim: int, block_size: int) -> bool:
    return head_dim % _MULTIPLE == 0 and block_size % _MULTIPLE == 0


class TileOps(NativeOps):
    kv_dtype = torch.bfloat16

    def __init__(self, library: CDLL) -> None:
        super().__init__(library)
        assert has_tiles(library), "asking also opens the tiles to this process"
        declare(library, _ARGUMENTS)

    def linear(self, weight: Tensor, bias: Tensor | None, *, rounds: bool = True) -> Linear:
        """`weight` [out, in] float32, `bias` [out]; activations are rounded to bfloat16 on their way in if `rounds`."""
        narrow = weight.bfloat16()
        if not rounds or not torch.equal(narrow.float(), weight):
            return super().linear(weight, bias)
        out, width = weight.shape
        packed = torch.empty(_up_to(out, 2 * _ROWS) * _up_to(width, _DEPTH), dtype=torch.bfloat16)
        self._library.hpu_pack_tiles(narrow.data_ptr(), out, width, packed.data_ptr())
        offset = None if bias is None else bias.float().contiguous()
        run, where = self._library.hpu_linear_tiles, packed.data_ptr()
        offset_at, forks = None if offset is None else offset.data_ptr(), packed.nbytes >= _FORK_BYTES

        def apply(x: Tensor, _keep: tuple[Tensor, Tensor | None] = (packed, offset)) -> Tensor:
            x = x.contiguous()
            y = x.new_empty(x.shape[0], out)
            threads = torch.get_num_threads() if forks else 1
            run(x.data_ptr(), x.shape[0], where, offset_at, out, width, y.data_ptr(), threads)
            return y

        return apply

    def begin(self, cache: Pages, pages: Tensor) -> None:
        """Nothing: these kernels read no slot behind the last token."""

    def write(self, cache: Pages, slot_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        self._write(self._library.hpu_write_narrow, cache, slot_rows, keys, values)

    def singles(self, tables: Tensor, lens: Tensor, cache: Pages, group: int) -> NativeSingles:
        return NativeSingles(self._library.hpu_attend_singles_tiles, tables, lens)

    def chunk(self, blocks: Tensor, context_len: int, new_len: int, scale: float) -> TileChunk:
        return TileChunk(self._library, blocks, context_len, new_len, scale)


class TileChunk:
    """Attention of one row with several new tokens."""

    def __init__(self, library: CDLL, blocks: Tensor, context_len: int, new_len: int, scale: float) -> None:
        self._run = library.hpu_attend_chunk_tiles
        self._blocks = blocks.contiguous()
        self._context_len, self._new_len, self._scale = context_len, new_len, scale
        self._threads = torch.get_num_threads() if new_len >= _FORK_QUERIES else 1

    def attend(self, q: Tensor, cache: Pages) -> Tensor:
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

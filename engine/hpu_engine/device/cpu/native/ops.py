"""The compiled kernels on tensors: linears of one weight, and the operations between them (`StepOps` of the model).

Everything is float32 and contiguous; weights are bfloat16 where that is exact. Every kernel computes a row alike
whatever stands beside it, so an exact device needs no padding for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hpu_engine.device.base import ExpertKernel, HeadNorms, Linear, Turn
from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.device.cpu.torch_ops import ChunkAttention, Singles

_PANEL = 16
_FORK_BYTES = 3_000_000
"""Weights times rows from which a product is worth waking a second thread: some 200 microseconds of one row's work."""
_FORK_KEYS = 2048

POINTER, COUNT, FLAG, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS: dict[str, Sequence[object]] = {
    "hpu_pack_bfloat16": (POINTER, COUNT, COUNT, POINTER),
    "hpu_pack_float32": (POINTER, COUNT, COUNT, POINTER),
    "hpu_linear_bfloat16": (POINTER, COUNT, POINTER, POINTER, COUNT, COUNT, POINTER, FLAG),
    "hpu_linear_float32": (POINTER, COUNT, POINTER, POINTER, COUNT, COUNT, POINTER, FLAG),
    "hpu_add_norm": (POINTER, POINTER, POINTER, REAL, COUNT, COUNT, POINTER, POINTER, FLAG),
    "hpu_silu_mul": (POINTER, COUNT, COUNT, POINTER, FLAG),
    "hpu_rotate": (
        *(POINTER, COUNT, COUNT, COUNT, COUNT, POINTER, POINTER),
        *(FLAG, POINTER, POINTER, REAL, POINTER, POINTER, FLAG),
    ),
    "hpu_write": (POINTER, POINTER, *[COUNT] * 5, POINTER, POINTER, POINTER),
    "hpu_attend_singles": (
        *(POINTER, POINTER, POINTER, POINTER, POINTER, COUNT, COUNT, COUNT, COUNT),
        *(COUNT, COUNT, POINTER, FLAG),
    ),
}


def declare(library: ctypes.CDLL, arguments: Mapping[str, Sequence[object]]) -> None:
    """Functions that return nothing, with the types of their arguments."""
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None


class NativeOps:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        declare(library, _ARGUMENTS)

    def linear(self, weight: Tensor, bias: Tensor | None, *, rounds: bool = True) -> Linear:
        """`weight` [out, in] float32, `bias` [out]. Activations are never rounded here, whatever `rounds` allows."""
        out, width = weight.shape
        narrow = weight.bfloat16()
        is_exact = torch.equal(narrow.float(), weight)
        own = (narrow if is_exact else weight).contiguous()
        kind = "bfloat16" if is_exact else "float32"
        packed = torch.empty(-(-out // _PANEL) * _PANEL * width, dtype=own.dtype)
        getattr(self._library, f"hpu_pack_{kind}")(own.data_ptr(), out, width, packed.data_ptr())
        run = getattr(self._library, f"hpu_linear_{kind}")
        return NativeLinear(run, out, width, packed, None if bias is None else bias.float().contiguous())

    def mlp(self, gate_up: Linear, down: Linear) -> Linear | None:
        """None: nothing is gained over its parts."""
        return None

    def experts(self, experts: Sequence[tuple[Linear, Linear]]) -> ExpertKernel | None:
        """None: nothing is gained over a loop."""
        return None

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        total = x if delta is None else torch.empty_like(x)
        normed = torch.empty_like(x)
        delta = None if delta is None else delta.contiguous()
        self._library.hpu_add_norm(
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            eps,
            x.shape[0],
            x.shape[1],
            total.data_ptr(),
            normed.data_ptr(),
            torch.get_num_threads(),
        )
        return total, normed

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._library.hpu_silu_mul(gate_up.data_ptr(), rows, width, out.data_ptr(), torch.get_num_threads())
        return out

    def rotate(self, qkv: Tensor, heads: int, norms: HeadNorms | None, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        tokens, all_heads, dim = qkv.shape
        kv_heads = (all_heads - heads) // 2
        q, keys = qkv.new_empty(tokens, heads, dim), qkv.new_empty(tokens, kv_heads, dim)
        self._library.hpu_rotate(
            qkv.data_ptr(),
            *(tokens, heads, kv_heads, dim, turn.cos.data_ptr(), turn.sin.data_ptr(), turn.interleaved),
            None if norms is None else norms.q.data_ptr(),
            None if norms is None else norms.k.data_ptr(),
            0.0 if norms is None else norms.eps,
            q.data_ptr(),
            keys.data_ptr(),
            torch.get_num_threads(),
        )
        return q, keys, qkv[:, heads + kv_heads :]

    def begin(self, cache: LayerPages, pages: Tensor) -> None:
        """Torch's kernels, which attend to chunks here, multiply what lies behind the last token by 0."""
        cache.clear(pages)

    def write(self, cache: LayerPages, slot_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        self._write(self._library.hpu_write, cache, slot_rows, keys, values)

    def _write(
        self, run: Callable[..., None], cache: LayerPages, slot_rows: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Rows of `keys` and `values` may stand apart, each head's elements together."""
        tokens, kv_heads, dim = keys.shape
        run(
            keys.data_ptr(),
            values.data_ptr(),
            *(keys.stride(0), values.stride(0), tokens * kv_heads, kv_heads * dim, kv_heads),
            slot_rows.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
        )

    def singles(self, tables: Tensor, lens: Tensor, cache: LayerPages, group: int) -> Singles:
        return NativeSingles(self._library.hpu_attend_singles, tables, lens)

    def chunk(self, blocks: Tensor, context_len: int, new_len: int, scale: float) -> ChunkAttention | None:
        """None: torch's fused kernel is as good."""
        return None


class NativeLinear:
    """A linear [out, width]; `packed` is what the kernels read, `bias` [out] float32."""

    def __init__(self, run: Callable[..., None], out: int, width: int, packed: Tensor, bias: Tensor | None) -> None:
        self.out, self.width, self.packed, self.bias = out, width, packed, bias
        self._run = run
        self._where, self._bias_at = packed.data_ptr(), None if bias is None else bias.data_ptr()

    def __call__(self, x: Tensor, /) -> Tensor:
        x = x.contiguous()
        rows = x.shape[0]
        y = x.new_empty(rows, self.out)
        threads = torch.get_num_threads() if self.packed.nbytes * rows >= _FORK_BYTES else 1
        self._run(x.data_ptr(), rows, self._where, self._bias_at, self.out, self.width, y.data_ptr(), threads)
        return y


class NativeSingles:
    """Attention of the rows with one new token of one step, each over its own pages."""

    def __init__(self, run: Callable[..., None], tables: Tensor, lens: Tensor) -> None:
        self._run = run
        self._tables, self._lens = tables.contiguous(), lens.contiguous()
        is_worth_forking = self._lens.shape[0] and int(self._lens.sum()) >= _FORK_KEYS
        self._threads = torch.get_num_threads() if is_worth_forking else 1

    def attend(self, q: Tensor, cache: LayerPages) -> Tensor:
        q = q.contiguous()
        out = torch.empty_like(q)
        rows, kv_heads, group, dim = q.shape
        self._run(
            *(q.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr()),
            *(self._tables.data_ptr(), self._lens.data_ptr(), rows, self._tables.shape[1]),
            *(kv_heads, group, cache.keys.shape[2], dim, out.data_ptr(), self._threads),
        )
        return out

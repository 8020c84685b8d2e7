"""Runs batches on one rank: a transformer, its KV cache, and the shapes it is warmed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpu_engine.core.batch import Batch, build_batch
from hpu_engine.core.kv_blocks import SCRATCH_BLOCK
from hpu_engine.core.request import Request
from hpu_engine.core.sampling_params import SamplingParams
from hpu_engine.core.scheduler import Row, Step
from hpu_engine.device.base import WarmUpShape
from hpu_engine.model.kv_cache import LayerCache
from hpu_engine.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class ModelRunner:
    transformer: Transformer
    caches: Sequence[LayerCache]

    @property
    def vocab(self) -> int:
        return self.transformer.description.vocab

    @property
    def block_size(self) -> int:
        return self.caches[0].block_size

    def hidden(self, batch: Batch) -> Tensor:
        """Runs the batch: [tokens, hidden]."""
        return self.transformer.hidden(batch, self.caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] of `hidden` to [rows, vocab] float32."""
        return self.transformer.logits(hidden)

    def execute(self, batch: Batch) -> Tensor:
        """Logits [emitting rows, vocab] float32."""
        return self.logits(self.hidden(batch)[batch.output_rows])

    @torch.inference_mode()
    def warm_up(self, shape: WarmUpShape) -> None:
        """Run one step of `shape` that reads and writes scratch only."""
        self.execute(build_batch(_scratch_step(shape, self.block_size), self.block_size))


def _scratch_step(shape: WarmUpShape, block_size: int) -> Step:
    chunks = [_scratch_row(shape.context_len, shape.chunk_len, block_size) for _ in range(shape.chunks)]
    singles = [_scratch_row(shape.context_len, 1, block_size) for _ in range(shape.singles)]
    return Step((*chunks, *singles))


def _scratch_row(context_len: int, new_len: int, block_size: int) -> Row:
    request = Request("warm-up", [0] * (context_len + new_len), SamplingParams(), seed=0)
    request.blocks = [SCRATCH_BLOCK] * -(-(context_len + new_len) // block_size)
    return Row(request, context_len, new_len, emits=True)

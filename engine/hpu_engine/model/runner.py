"""Runs batches on one rank: a transformer and its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import Device
from hpu_engine.model.kv_cache import LayerCache
from hpu_engine.model.transformer import Transformer
from hpu_engine.step.batch import Batch
from hpu_engine.step.padded_batch import PaddedBatch


@dataclass(frozen=True, slots=True)
class ModelRunner:
    transformer: Transformer
    caches: Sequence[LayerCache]
    device: Device

    @property
    def vocab(self) -> int:
        return self.transformer.description.vocab

    @property
    def block_size(self) -> int:
        return self.caches[0].block_size

    def hidden(self, batch: Batch | PaddedBatch) -> Tensor:
        """Runs the batch: [tokens, hidden]; of a padded batch [rows of its buffer, hidden], whatever its tokens."""
        with self.device.working_on(batch.num_tokens):
            hidden = self.transformer.hidden(batch, self.caches)
        if isinstance(batch, PaddedBatch):
            return F.pad(hidden, (0, 0, 0, batch.buffer_rows - batch.num_tokens))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] of `hidden` to [rows, vocab] float32."""
        with self.device.working_on(hidden.shape[0]):
            return self.transformer.logits(hidden)

    def execute(self, batch: Batch | PaddedBatch) -> Tensor:
        """Logits [emitting rows, vocab] float32."""
        return self.logits(self.hidden(batch)[batch.output_rows])

    def attend(self, batch: PaddedBatch) -> None:
        """Runs only the attention of the batch, in one layer: it is compiled apart, and alike for all layers."""
        shape, cache = self.transformer.attention_shape, self.caches[0]
        q = torch.zeros(batch.num_tokens, shape.heads, shape.head_dim, dtype=self.transformer.dtype)
        self.transformer.attention(batch, cache).attend(q, cache)

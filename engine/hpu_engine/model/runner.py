"""Runs steps on one worker: a transformer and its KV cache, from a step's input to logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import Device, LayerCache
from hpu_engine.model.transformer import Transformer
from hpu_engine.step.batch import Batch, build_batch
from hpu_engine.step.input import StepInput
from hpu_engine.step.loop import TakeScores
from hpu_engine.step.padded_batch import PaddedBatch, build_padded_batch
from hpu_engine.step.shapes import FirstSeen, ShapeMap, StepShapes


@dataclass(slots=True)
class ModelRunner:
    """`shape`: what runs now, or ran last, in words. `outputs`: the tokens of the last step's outputs, which the next
    step may refer to; whoever samples sets them.
    """

    transformer: Transformer
    caches: Sequence[LayerCache]
    device: Device
    shapes: ShapeMap
    first_seen: FirstSeen = field(default_factory=FirstSeen)
    shape: str | None = None
    outputs: Tensor | None = None

    @property
    def vocab(self) -> int:
        return self.transformer.description.vocab

    @torch.inference_mode()
    def run(self, step: StepInput, shapes: StepShapes, take_scores: TakeScores = lambda logits, count: None) -> Tensor:
        """Runs `step` in `shapes`: logits [outputs, vocab] float32 of its emitting rows, then of padding.

        Logits of scored prompt tokens go to `take_scores` piece by piece: all of a chunk at once would take more memory
        than anything else. A step with fewer rows than `shapes`, down to none, runs the same operations, and reads and
        writes nothing but scratch for what is missing.
        """
        self.shape = str(shapes)
        self.first_seen.see(shapes.recipes())
        batch = self._batch(step, shapes)
        with self.device.working_on(batch.num_tokens):
            hidden = self.transformer.hidden(batch, self.caches)
        if isinstance(batch, PaddedBatch):
            hidden = F.pad(hidden, (0, 0, 0, batch.buffer_rows - batch.num_tokens))
        # A head over no rows would be a shape of its own.
        wanted = shapes.outputs.padded
        logits = self._logits(hidden[batch.output_rows]) if wanted else hidden.new_empty(0, self.vocab)
        for fit, rows in zip(shapes.scores, batch.score_pieces, strict=True):
            take_scores(self._logits(hidden[rows]), fit.count)
        return logits

    def _batch(self, step: StepInput, shapes: StepShapes) -> Batch | PaddedBatch:
        put, buckets = self.device.put, self.shapes.buckets
        batch: Batch | PaddedBatch
        if buckets is None:
            batch = build_batch(step, self.shapes.block_size, put)
        else:
            batch = build_padded_batch(step, shapes, buckets.limits, put)
        if step.refers_back:
            assert self.outputs is not None, "a step refers to outputs that this worker was not given"
            ids = batch.token_ids
            batch = replace(batch, token_ids=torch.where(ids < 0, self.outputs[(-1 - ids).clamp_min(0)], ids))
        return batch

    def _logits(self, hidden: Tensor) -> Tensor:
        with self.device.working_on(hidden.shape[0]):
            return self.transformer.logits(hidden)

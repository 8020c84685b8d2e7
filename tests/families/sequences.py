"""A transformer driven row by row, without scheduler or server: the test says what each step carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpu_engine.device.base import LayerCache
from hpu_engine.device.cpu.device import CpuDevice
from hpu_engine.group.collectives import ALONE, Groups
from hpu_engine.model.builder import build_transformer
from hpu_engine.model.transformer import Transformer
from hpu_engine.model.weights.placement import Placement
from hpu_engine.planning import read_model_description
from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Row, Step
from tests.engine.rows import batch_of

BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 12


@dataclass
class Sequences:
    """`tokens` are whole sequences; `step` computes the next tokens of some of them."""

    transformer: Transformer
    caches: Sequence[LayerCache]
    tokens: Sequence[Sequence[int]]
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.computed = [0] * len(self.tokens)

    @torch.inference_mode()
    def step(self, new: Sequence[tuple[int, int]]) -> None:
        """`new` has (sequence, number of new tokens); their logits are kept in `logits`."""
        rows = [self._row(index, count) for index, count in new]
        batch = batch_of(Step(tuple(rows)), BLOCK_SIZE)
        logits = self.transformer.logits(self.transformer.hidden(batch, self.caches))
        position = 0
        for index, count in sorted(new, key=lambda pair: pair[1] == 1):  # singles stand behind chunks
            self._kept(index).append(logits[position : position + count])
            self.computed[index] += count
            position += count

    def logits(self, index: int) -> Tensor:
        return torch.cat(self._kept(index))

    def _kept(self, index: int) -> list[Tensor]:
        self._logits: dict[int, list[Tensor]] = getattr(self, "_logits", {})
        return self._logits.setdefault(index, [])

    def _row(self, index: int, count: int) -> Row:
        request = Request(str(index), list(self.tokens[index]), SamplingParams(), seed=0)
        first = 1 + index * BLOCKS_PER_SEQUENCE
        request.blocks = list(range(first, first + BLOCKS_PER_SEQUENCE))
        return Row(request, self.computed[index], count, emits=True)


def open_sequences(
    directory: Path,
    tokens: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype = torch.float32,
    placement: Placement | None = None,
    groups: Groups = ALONE,
) -> Sequences:
    """The checkpoint, or one worker's part of it."""
    description = read_model_description(directory)
    transformer = build_transformer(
        directory,
        description,
        CpuDevice(),
        dtype=dtype,
        max_len=BLOCK_SIZE * BLOCKS_PER_SEQUENCE,
        on_bytes=lambda _done, _total: None,
        placement=placement,
        groups=groups,
    )
    return Sequences(transformer, caches_for(transformer, len(tokens)), tokens)


def caches_for(transformer: Transformer, sequences: int) -> Sequence[LayerCache]:
    """Of the worker's own heads."""
    return transformer.device.new_kv_cache(
        layers=len(transformer.layers),
        pages=sequences * BLOCKS_PER_SEQUENCE + 1,
        kv_heads=transformer.attention_shape.kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=transformer.attention_shape.head_dim,
        dtype=transformer.dtype,
    )


def random_tokens(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count, length), generator=generator).tolist()


def reference_logits(directory: Path, tokens: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> Tensor:
    """transformers' logits [sequences, tokens, vocab] of sequences of one length."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor(tokens)).logits
    return logits.float()

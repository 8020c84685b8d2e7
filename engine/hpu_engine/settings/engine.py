"""What one rank is told to run: the part of `hpu-engine serve`'s settings that its workers need. Torch-free."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

import msgspec

from hpu_engine.planning import Card, Layout, ModelDescription, Specification
from hpu_engine.planning.cards import BLOCK_SIZE, MAX_NUM_SEQS


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in tokens unless named otherwise. None means: the device's default, or what the model allows."""

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int | None = None
    block_size: int = BLOCK_SIZE
    kv_cache_memory_bytes: int | None = None
    num_kv_blocks: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    exact: bool = False
    """A token's bits do not depend on batch mates, chunks, preemption or cached prefixes (CPU device only)."""
    force_buckets: bool = False
    """Steps are padded to the buckets of their plan, as on a device that compiles every shape."""
    kernels: Literal["auto", "torch"] = "auto"
    """auto: the engine's own where they were built ahead for this processor; torch: never (CPU device only)."""
    compile: bool = False
    """Kernels compiled for this processor at the first start (CPU device only)."""
    compile_cache: str | None = None
    """Folder in which they are kept; None: below the user's cache."""

    def specification(self, model: ModelDescription, card: Card) -> Specification:
        """What is asked of `planning`: settings of one name mean the same there and here."""
        layout = Layout(self.tensor_parallel_size, self.data_parallel_size, self.expert_parallel_size)
        shared = {field.name for field in fields(Specification)} & set(self.__struct_fields__) - {"model"}
        settings: dict[str, Any] = {name: getattr(self, name) for name in shared}
        return Specification(model, card, layout, **settings)

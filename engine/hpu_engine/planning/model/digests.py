"""The two digests of a model. Pure: what they are taken from is read elsewhere.

Shape digest: all that decides which recipes a model needs. Two checkpoints of equal shapes have the same one, whatever
their weights are and however they are cut into files. Recipe keys hold it.

Content digest: all that tells two checkpoints apart without reading their weights. For a model from a hub that is the
commit, otherwise the sizes, modification times and headers of the weights files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from hpu_engine.planning.model.description import ModelDescription


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One entry of a safetensors header. `dtype` is the format's own name; bytes begin at `offset` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class WeightsFile:
    name: str
    size_bytes: int
    modified_ns: int
    tensors: tuple[TensorHeader, ...]


def shape_digest(
    model: ModelDescription, files: Iterable[WeightsFile], scales: Mapping[str, float] | None = None
) -> str:
    """`scales` are those that are compiled into recipes as constants, by name."""
    # Ids that end an answer are compared on the host.
    description = model.model_dump(mode="json", exclude={"bos_token_id", "eos_token_ids"})
    tensors = sorted((tensor.name, tensor.dtype, tensor.shape) for file in files for tensor in file.tensors)
    return _digest([description, tensors, dict(scales or {})])


def content_digest(files: Iterable[WeightsFile], commit: str | None = None) -> str:
    """`commit` is the hub's, None where the model is a plain folder."""
    return _digest(commit or [asdict(file) for file in sorted(files, key=lambda file: file.name)])


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

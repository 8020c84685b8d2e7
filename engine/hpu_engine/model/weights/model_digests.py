"""Reads what the digests of a model are taken from: headers and attributes of its weights files. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpu_engine.model.weights.safetensors_files import list_tensors
from hpu_engine.planning.model.description import ModelDescription
from hpu_engine.planning.model.digests import TensorHeader, WeightsFile, content_digest, shape_digest

_SNAPSHOT = re.compile(r"snapshots/([0-9a-f]{40})$")
"""Where the hub's own cache puts a commit."""


@dataclass(frozen=True, slots=True)
class ModelDigests:
    shape: str
    content: str


def read_digests(directory: Path, model: ModelDescription) -> ModelDigests:
    """Raises WeightsError."""
    files = read_weights_files(directory)
    found = _SNAPSHOT.search(str(directory.resolve()))
    return ModelDigests(shape_digest(model, files), content_digest(files, found[1] if found else None))


def read_weights_files(directory: Path) -> tuple[WeightsFile, ...]:
    """Raises WeightsError."""
    by_file: dict[Path, list[TensorHeader]] = {}
    for tensor in list_tensors(directory).values():
        header = TensorHeader(tensor.name, tensor.dtype, tensor.shape, tensor.offset)
        by_file.setdefault(tensor.file, []).append(header)
    stats = {file: file.stat() for file in by_file}
    return tuple(
        WeightsFile(file.name, stats[file].st_size, stats[file].st_mtime_ns, tuple(tensors))
        for file, tensors in by_file.items()
    )

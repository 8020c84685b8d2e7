"""A checkpoint's names, shapes and types against the table, before the first byte of a tensor is read.

A bad one fails in the first second, not after minutes of loading; every worker checks the whole model, so that all of
them refuse alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from hpu_engine.contract import FailureReason
from hpu_engine.model.weights.errors import WeightsError
from hpu_engine.model.weights.name_table import NameTable, nearest
from hpu_engine.model.weights.reading import DTYPES
from hpu_engine.model.weights.safetensors_files import StoredTensor


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_stored(stored: Mapping[str, StoredTensor], table: NameTable, directory: Path) -> None:
    """Every name of the table is stored with its shape and a type we read, nothing else is. Raises WeightsError."""
    check_names(stored, table, directory)
    for name, tensor in stored.items():
        if name in table.parts and tensor.dtype not in DTYPES:
            raise WeightsError(
                f"type {tensor.dtype} is not supported; supported are {', '.join(DTYPES)}",
                path=str(tensor.file),
                tensor=name,
                reason=FailureReason.MODEL_UNSUPPORTED,
            )


def check_names(found: Mapping[str, _Shaped], table: NameTable, source: Path) -> None:
    """Names and shapes alone. Raises WeightsError."""
    for name in table.parts:
        if name not in found:
            raise WeightsError("missing" + _hint(name, set(found) - set(table.parts)), path=str(source), tensor=name)
    for name, tensor in found.items():
        if table.is_ignored(name) and name not in table.parts:
            continue
        file = str(getattr(tensor, "file", source))
        part = table.parts.get(name)
        if part is None:
            raise WeightsError("this model has no such tensor" + _hint(name, table.parts), path=file, tensor=name)
        if tuple(tensor.shape) != part.shape:
            raise WeightsError(
                f"shape {list(tensor.shape)} is stored, {list(part.shape)} is needed", path=file, tensor=name
            )


def _hint(name: str, candidates: Iterable[str]) -> str:
    close = nearest(name, candidates)
    return f"; the nearest name is {close}" if close else ""

"""Streams a checkpoint into whole parameters, one at a time, so that no more than the open ones are held twice.

Names, shapes and types of the whole checkpoint are checked before the first byte is read: a bad one fails in the first
second, not after minutes of loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpu_engine.contract import FailureReason
from hpu_engine.model.weights.errors import WeightsError
from hpu_engine.model.weights.name_table import NameTable, nearest
from hpu_engine.model.weights.safetensors_files import StoredTensor, list_tensors

LOADABLE = ("F32", "BF16", "F16")

OnBytes = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""


def check_names(stored: dict[str, StoredTensor], table: NameTable, directory: Path) -> None:
    """Every name of the table is stored with its shape, and nothing else is. Raises WeightsError."""
    for name in table.parts:
        if name not in stored:
            raise WeightsError(
                "missing" + _hint(name, set(stored) - set(table.parts)), path=str(directory), tensor=name
            )
    for name, tensor in stored.items():
        if table.is_ignored(name):
            continue
        part = table.parts.get(name)
        if part is None:
            raise WeightsError(
                "this model has no such tensor" + _hint(name, table.parts), path=str(tensor.file), tensor=name
            )
        if tensor.shape != part.shape:
            raise WeightsError(
                f"shape {list(tensor.shape)} is stored, {list(part.shape)} is needed",
                path=str(tensor.file),
                tensor=name,
            )
        if tensor.dtype not in LOADABLE:
            raise WeightsError(
                f"type {tensor.dtype} is not supported; supported are {', '.join(LOADABLE)}",
                path=str(tensor.file),
                tensor=name,
                reason=FailureReason.MODEL_UNSUPPORTED,
            )


def load_parameters(
    directory: Path, table: NameTable, dtype: torch.dtype, on_bytes: OnBytes
) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of the table, whole and as `dtype`, once all its parts were read. Raises WeightsError."""
    stored = list_tensors(directory)
    check_names(stored, table, directory)
    wanted = [stored[name] for name in stored if name in table.parts]
    total = sum(tensor.num_bytes for tensor in wanted)
    done = 0
    on_bytes(0, total)
    open_parameters = _OpenParameters(table, dtype)
    for tensor, values in _read(wanted):
        complete = open_parameters.fill(tensor.name, values)
        if complete is not None:
            yield complete
        done += tensor.num_bytes
        on_bytes(done, total)


def _read(wanted: list[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in wanted:
        by_file.setdefault(tensor.file, []).append(tensor)
    for file, tensors in by_file.items():
        try:
            with safe_open(file, framework="pt") as reader:
                for tensor in tensors:
                    yield tensor, reader.get_tensor(tensor.name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"cannot be read: {error}", path=str(file)) from error


@dataclass(slots=True)
class _Open:
    values: Tensor
    missing: int


class _OpenParameters:
    """Parameters some of whose parts have been read."""

    def __init__(self, table: NameTable, dtype: torch.dtype) -> None:
        self._table = table
        self._dtype = dtype
        self._open: dict[str, _Open] = {}
        self._num_parts: dict[str, int] = {}
        for part in table.parts.values():
            self._num_parts[part.parameter] = self._num_parts.get(part.parameter, 0) + 1

    def fill(self, name: str, values: Tensor) -> tuple[str, Tensor] | None:
        part = self._table.parts[name]
        parameter = self._open.get(part.parameter)
        if parameter is None:
            whole = torch.empty(self._table.parameters[part.parameter], dtype=self._dtype)
            parameter = self._open[part.parameter] = _Open(whole, self._num_parts[part.parameter])
        parameter.values[part.row : part.row + part.shape[0]].copy_(values)
        parameter.missing -= 1
        if parameter.missing:
            return None
        del self._open[part.parameter]
        return part.parameter, parameter.values


def _hint(name: str, candidates: Iterable[str]) -> str:
    close = nearest(name, candidates)
    return f"; the nearest name is {close}" if close else ""

"""Two drivers of one name table: a checkpoint streamed from its files, or tensors that are all in memory already.

Both yield each parameter once, complete, as this worker holds it. Streaming holds no more than the parameters that are
not complete yet and the one part that is being read; the caller may pack or move a parameter before the next one comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hpu_engine.device.base import HOST
from hpu_engine.model.weights.checking import check_names, check_stored
from hpu_engine.model.weights.name_table import NameTable, StoredPart
from hpu_engine.model.weights.reading import DTYPES, CheckpointReader
from hpu_engine.model.weights.safetensors_files import StoredTensor, list_tensors

OnBytes = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""


def load_parameters(
    directory: Path, table: NameTable, dtype: torch.dtype, on_bytes: OnBytes, reader: CheckpointReader | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Stream the parameters of `table`, as `dtype` (wide ones as float32). Raises WeightsError."""
    stored = list_tensors(directory)
    check_stored(stored, table, directory)
    wanted = [(tensor, part) for tensor in stored.values() if (part := _here(tensor.name, table)) is not None]
    total = sum(_held_bytes(tensor, part) for tensor, part in wanted)
    done = 0
    on_bytes(0, total)
    open_parameters = _OpenParameters(table, dtype)
    with reader or CheckpointReader() as source:
        for tensor, part in wanted:
            complete = open_parameters.fill(part, _Stored(source, tensor, part))
            done += _held_bytes(tensor, part)
            on_bytes(done, total)
            if complete is not None:
                yield complete


def take_parameters(
    tensors: Mapping[str, Tensor], table: NameTable, dtype: torch.dtype, source: Path
) -> Iterator[tuple[str, Tensor]]:
    """The same parameters out of whole tensors in memory; `source` names them in errors. Raises WeightsError."""
    check_names(tensors, table, source)
    open_parameters = _OpenParameters(table, dtype)
    for name, tensor in tensors.items():
        part = _here(name, table)
        if part is not None:
            complete = open_parameters.fill(part, _InMemory(tensor, part))
            if complete is not None:
                yield complete


def _here(name: str, table: NameTable) -> StoredPart | None:
    part = table.parts.get(name)
    return part if part is not None and part.region is not None else None


def _held_bytes(tensor: StoredTensor, part: StoredPart) -> int:
    return prod(part.held_shape) * DTYPES[tensor.dtype].itemsize


@dataclass(frozen=True, slots=True)
class _Stored:
    reader: CheckpointReader
    tensor: StoredTensor
    part: StoredPart

    def copy_to(self, target: Tensor) -> None:
        """Straight into place where the types agree, else by way of one part in its own type."""
        assert self.part.region is not None
        own = DTYPES[self.tensor.dtype]
        values = target if own == target.dtype else torch.empty(target.shape, dtype=own, device=HOST)
        self.reader.read(self.tensor, self.part.region, values)
        if values is not target:
            target.copy_(values)


@dataclass(frozen=True, slots=True)
class _InMemory:
    tensor: Tensor
    part: StoredPart

    def copy_to(self, target: Tensor) -> None:
        assert self.part.region is not None
        held = self.tensor[tuple(slice(start, stop) for start, stop in self.part.region)]
        target.copy_(held.reshape(target.shape))


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

    def fill(self, part: StoredPart, source: _Stored | _InMemory) -> tuple[str, Tensor] | None:
        """The part's parameter, if this was the last part of it."""
        parameter = self._open.get(part.parameter)
        if parameter is None:
            wanted = self._table.parameters[part.parameter]
            dtype = torch.float32 if wanted.wide else self._dtype
            whole = torch.empty(wanted.shape, dtype=dtype, device=HOST)
            parameter = self._open[part.parameter] = _Open(whole, wanted.parts)
        rows = prod(part.held_shape) // max(prod(parameter.values.shape[1:]), 1)
        source.copy_to(parameter.values[part.row : part.row + rows])
        parameter.missing -= 1
        if parameter.missing:
            return None
        del self._open[part.parameter]
        return part.parameter, parameter.values

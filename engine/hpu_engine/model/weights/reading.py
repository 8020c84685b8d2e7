"""Bytes of tensors: reads exactly the region of a stored tensor that is asked for, and counts what it read.

Plain positioned reads into the memory where the values will stay: a mapped file would count its pages as this process's
memory and read whole pages around every piece. Rows are one run of bytes; columns are one run per row.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from hpu_engine.model.weights.errors import WeightsError
from hpu_engine.model.weights.placement import Region
from hpu_engine.model.weights.safetensors_files import StoredTensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types a parameter may be stored in."""

Run = tuple[int, int]
"""Offset in the tensor and length, in bytes."""


def byte_runs(shape: tuple[int, ...], region: Region, item_bytes: int) -> list[Run]:
    """The runs of bytes that hold `region` of a row-major tensor of `shape`, in the order of its elements."""
    # The axes behind the last one that is cut are contiguous; so is the cut axis itself.
    cut = max((axis for axis, (start, stop) in enumerate(region) if (start, stop) != (0, shape[axis])), default=0)
    inner = prod(shape[cut + 1 :]) * item_bytes
    start, stop = region[cut] if region else (0, 1)
    offsets = [0]
    stride = inner * (shape[cut] if region else 1)
    for axis in reversed(range(cut)):
        first, last = region[axis]
        offsets = [index * stride + offset for index in range(first, last) for offset in offsets]
        stride *= shape[axis]
    return [(offset + start * inner, (stop - start) * inner) for offset in sorted(offsets)]


class CheckpointReader:
    """Open files of one checkpoint, to be used as a context. `bytes_read` counts what came out of the files."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read(self, tensor: StoredTensor, region: Region, into: Tensor) -> None:
        """Fill the contiguous `into`, of the tensor's own type and the region's element count. Raises WeightsError."""
        target = memoryview(into.view(-1).view(torch.uint8).numpy().data)
        filled = 0
        try:
            descriptor = self._open(tensor.file)
            for offset, length in byte_runs(tensor.shape, region, into.element_size()):
                self._fill(descriptor, tensor.offset + offset, target[filled : filled + length], tensor)
                filled += length
        except OSError as error:
            raise WeightsError(
                f"cannot be read: {error.strerror}", path=str(tensor.file), tensor=tensor.name
            ) from error
        assert filled == len(target)

    def _open(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[file]

    def _fill(self, descriptor: int, offset: int, target: memoryview, tensor: StoredTensor) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(descriptor, [target[done:]], offset + done)
            if count == 0:
                raise WeightsError(
                    f"truncated while it was read: no byte at {offset + done}",
                    path=str(tensor.file),
                    tensor=tensor.name,
                )
            self.bytes_read += count
            done += count

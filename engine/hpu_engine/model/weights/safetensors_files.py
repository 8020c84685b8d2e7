"""The safetensors files of a checkpoint directory: which tensors there are, where, and of what shape and type.

Reads headers only; the bytes come later, one tensor at a time. Everything a file claims is checked against its length
before it is believed: a truncated download is named here, not discovered as noise in the answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpu_engine.contract import FailureReason
from hpu_engine.model.weights.errors import WeightsError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEADER_LIMIT_BYTES = 100 * 1024 * 1024
"""The format's own limit on its JSON header (safetensors README)."""
INDEX_LIMIT_BYTES = 256 * 1024 * 1024
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint. `dtype` is the format's own name (`BF16`); its bytes begin at `offset` of `file`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int


def list_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint, in file order. Raises WeightsError."""
    try:
        return _list_tensors(directory)
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}", path=str(error.filename or directory)) from error


def _list_tensors(directory: Path) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for file in _files(directory):
        for tensor in _read_header(file):
            if tensor.name in stored:
                raise WeightsError(
                    f"also stored in {stored[tensor.name].file.name}", path=str(file), tensor=tensor.name
                )
            stored[tensor.name] = tensor
    _check_index(directory, stored)
    return stored


def _check_index(directory: Path, stored: dict[str, StoredTensor]) -> None:
    """An index that puts a tensor elsewhere than it is was written for other files: half of an old download."""
    index = directory / INDEX_NAME
    if not index.is_file():
        return
    for name, file in _weight_map(index).items():
        found = stored.get(name)  # None is an error only where the model has such a tensor, and said there
        if found is not None and found.file.name != file:
            message = f"{INDEX_NAME} puts it in {file}, but it is in {found.file.name}"
            raise WeightsError(message, path=str(directory / file), tensor=name)


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX_NAME
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise WeightsError(
                f"no such file, though {INDEX_NAME} lists it ({len(missing)} of {len(names)} are missing)",
                path=str(directory / missing[0]),
                reason=FailureReason.MODEL_NOT_FOUND,
            )
        return [directory / name for name in names]
    single = directory / SINGLE_NAME
    if single.is_file():
        return [single]
    pickles = sorted(file.name for pattern in PICKLE_PATTERNS for file in directory.glob(pattern))
    if pickles:
        raise WeightsError(
            "a pickle checkpoint runs code when it is read and is not loaded; convert it to safetensors",
            path=str(directory / pickles[0]),
            reason=FailureReason.MODEL_UNSUPPORTED,
        )
    raise WeightsError(
        f"no weights here: neither {SINGLE_NAME} nor {INDEX_NAME}",
        path=str(directory),
        reason=FailureReason.MODEL_NOT_FOUND,
    )


def _weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > INDEX_LIMIT_BYTES:
        raise WeightsError(f"larger than {INDEX_LIMIT_BYTES} bytes", path=str(index))
    try:
        weight_map = json.loads(index.read_bytes(), object_pairs_hook=_no_key_twice)["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except _KeyTwice as error:
        raise WeightsError("listed twice", path=str(index), tensor=str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"not an index: a JSON object with weight_map is needed ({error!r})", path=str(index)
        ) from None
    outside = next((file for file in names.values() if Path(file).name != file), None)
    if outside is not None:
        raise WeightsError(f"lists {outside[:80]!r}; a plain file name is needed", path=str(index))
    if not names:
        raise WeightsError("weight_map is empty", path=str(index))
    return names


def _read_header(file: Path) -> Iterator[StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT_BYTES):
            raise WeightsError(
                f"truncated or not safetensors: {size} bytes, a header of {length} is announced", path=str(file)
            )
        try:
            header = dict(json.loads(stream.read(length), object_pairs_hook=_no_key_twice))
            header.pop("__metadata__", None)
            spans = [_Span.parse(name, entry) for name, entry in header.items()]
        except _KeyTwice as error:
            raise WeightsError("stored twice in one file", path=str(file), tensor=str(error)) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(f"not safetensors: its header does not parse ({error!r})", path=str(file)) from None
    taken = 0
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        if span.begin < taken:
            message = f"its bytes from {span.begin} on belong to another tensor up to {taken}"
            raise WeightsError(message, path=str(file), tensor=span.name)
        taken = span.end
        yield span.checked(file, 8 + length, size - 8 - length)


class _KeyTwice(Exception):
    pass


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON itself would keep the last one in silence."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _KeyTwice(key)
        found[key] = value
    return found


@dataclass(frozen=True, slots=True)
class _Span:
    """What a header claims about one tensor; `begin` and `end` count bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def parse(cls, name: str, entry: dict[str, Any]) -> _Span:
        begin, end = entry["data_offsets"]
        return cls(name, str(entry["dtype"]), tuple(int(length) for length in entry["shape"]), int(begin), int(end))

    def checked(self, file: Path, data_start: int, data_bytes: int) -> StoredTensor:
        """The claim, once it agrees with itself and with the length of the file. Raises WeightsError."""
        if not 0 <= self.begin <= self.end or self.end > data_bytes:
            message = f"truncated: the tensor ends at byte {self.end} of the data, the file holds {data_bytes}"
            raise WeightsError(message, path=str(file), tensor=self.name)
        stored = self.end - self.begin
        item = ITEM_BYTES.get(self.dtype)
        if item is not None and math.prod(self.shape) * item != stored:
            message = f"shape {list(self.shape)} of {self.dtype} needs other than the {stored} bytes stored"
            raise WeightsError(message, path=str(file), tensor=self.name)
        return StoredTensor(self.name, file, self.dtype, self.shape, stored, data_start + self.begin)

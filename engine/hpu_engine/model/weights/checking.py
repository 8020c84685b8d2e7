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
from hpu_engine.model.weights.name_table import NameTable, expand, nearest
from hpu_engine.model.weights.reading import DTYPES
from hpu_engine.model.weights.safetensors_files import StoredTensor, list_tensors
from hpu_engine.planning.model.description import ModelDescription

MISSING = "missing: config.json asks for it, and no file has it"
_QUANTISED = ".quant_weight"
_SCALES = (".activation_scale", ".input_scale", ".weight_scale", ".weight_scale_inv")


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_stored(stored: Mapping[str, StoredTensor], table: NameTable, directory: Path) -> None:
    """Every name of the table is stored with its shape and a type we read, nothing else is. Raises WeightsError."""
    check_scales(stored)
    check_names(stored, table, directory)
    for name, tensor in stored.items():
        if name in table.parts and tensor.dtype not in DTYPES:
            raise WeightsError(
                f"type {tensor.dtype} is not supported; supported are {', '.join(DTYPES)}",
                path=str(tensor.file),
                tensor=name,
                reason=FailureReason.MODEL_UNSUPPORTED,
            )


def refuse_quantised(directory: Path, model: ModelDescription) -> None:
    """Quantised weights are not computed with yet. What is wrong with their scales is said first: it would be wrong
    for any engine. Raises WeightsError, always.
    """
    stored = list_tensors(directory)
    check_scales(stored)
    for name, part in expand(model).parts.items():
        if part.scale is not None and name not in stored:
            raise WeightsError(MISSING + _hint(name, set(stored)), path=str(directory), tensor=name)
    method = (model.quantization or "")[:40]
    raise WeightsError(
        f"weights quantised with {method!r} are not supported",
        path=str(directory / "config.json"),
        reason=FailureReason.MODEL_UNSUPPORTED,
    )


def check_scales(stored: Mapping[str, StoredTensor]) -> None:
    """Every quantised weight has the scale without which its numbers mean nothing. Raises WeightsError."""
    for name, tensor in stored.items():
        if name.endswith(_QUANTISED):
            scales = [name.removesuffix(_QUANTISED) + ".weight_scale"]
        elif tensor.dtype.startswith("F8_") and name.endswith(".weight"):
            scales = [f"{name}_scale", f"{name}_scale_inv"]
        else:
            continue
        if not any(scale in stored for scale in scales):
            message = f"missing, though {name} is quantised" + _hint(scales[0], set(stored) - {name})
            raise WeightsError(message, path=str(tensor.file), tensor=scales[0])


def check_names(found: Mapping[str, _Shaped], table: NameTable, source: Path) -> None:
    """Names and shapes alone. Raises WeightsError."""
    for name in table.parts:
        if name not in found:
            raise WeightsError(MISSING + _hint(name, set(found) - set(table.parts)), path=str(source), tensor=name)
    for name, tensor in found.items():
        if table.is_ignored(name) and name not in table.parts:
            continue
        file = str(getattr(tensor, "file", source))
        part = table.parts.get(name)
        if part is None:
            raise WeightsError(_why_not(name, table), path=file, tensor=name)
        if tuple(tensor.shape) != part.shape:
            raise WeightsError(
                f"shape {list(tensor.shape)} is stored, {list(part.shape)} is needed", path=file, tensor=name
            )


def _why_not(name: str, table: NameTable) -> str:
    if name.endswith((_QUANTISED, *_SCALES)):
        return "belongs to quantised weights, and config.json declares no quantisation that has it"
    return "this model has no such tensor" + _hint(name, table.parts)


def _hint(name: str, candidates: Iterable[str]) -> str:
    close = nearest(name, candidates)
    return f"; the nearest name is {close}" if close else ""

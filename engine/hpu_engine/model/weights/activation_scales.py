"""ERNIE's float8 scales: what a stored one means, what is held of it, and how the card wants it laid out. Pure.

A checkpoint stores, per linear, the largest magnitude measured at its input (amax), or amax over what float8 holds.
At run time a value is multiplied by 1/scale on its way into float8 and by the scale on its way out. The names are rows
of the name table; they, the stored forms and the alignment are those that PaddlePaddle/FastDeploy reads on Gaudi (its
pull request 5855).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hpu_engine.device.base import HOST
from hpu_engine.model.moe.window import ExpertWindow
from hpu_engine.model.weights.errors import WeightsError
from hpu_engine.model.weights.name_table import SCALE_NAMES, Name, Scale, nearest

ALIGNMENT_BYTES = 0x80


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """Where one stored scale goes. `expert` None: not an expert's."""

    stored: Scale
    parameter: str
    layer: int
    expert: int | None


def target_of(name: str, source: str) -> ScaleTarget:
    """Raises WeightsError, with the nearest name there is, for a scale that nothing asks for."""
    for row in SCALE_NAMES:
        found = match(row, name)
        if found is not None:
            assert row.scale is not None
            parameter = row.parameter.format(layer=found["layer"])
            return ScaleTarget(row.scale, parameter, found["layer"], found.get("expert"))
    numbers = re.findall(r"\d+", name)
    known = [
        row.tensor.format(layer=numbers[0] if numbers else 0, expert=numbers[1] if len(numbers) > 1 else 0)
        for row in SCALE_NAMES
    ]
    close = nearest(name, known)
    hint = f"; the nearest name is {close}" if close else ""
    raise WeightsError(f"no such activation scale{hint}", path=source, tensor=name)


def match(row: Name, name: str) -> dict[str, int] | None:
    """The layer and expert in `name`; None where it is not of this row's pattern."""
    pattern = re.escape(row.tensor).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
    found = re.fullmatch(pattern, name)
    return None if found is None else {key: int(value) for key, value in found.groupdict().items()}


def multiplier(value: float, stored: Scale, largest: float, *, name: str, source: str) -> float:
    """What activations are multiplied with before they become float8: largest / amax.

    Raises WeightsError for a zero, negative or non-finite value: it would make every activation infinite or nothing.
    """
    if not 0.0 < value < float("inf"):
        raise WeightsError(f"a scale of {value} cannot be used; it has to be above 0", path=source, tensor=name)
    return largest / value if stored is Scale.AMAX else 1.0 / value


def shared_input_multiplier(multipliers: Mapping[int, float], experts: int, *, name: str, source: str) -> float:
    """One multiplier for the input that all experts of a layer share: the smallest has room for the widest range.

    `multipliers` are by expert, of all experts of the model and not only of a rank's window, so that every rank
    quantises alike. Raises WeightsError where one is missing.
    """
    _require(multipliers, range(experts), name, source)
    return min(multipliers[expert] for expert in range(experts))


def window_multipliers(multipliers: Mapping[int, float], window: ExpertWindow, *, name: str, source: str) -> Tensor:
    """[experts here, 1] float32 in the order of the window. Raises WeightsError where one is missing."""
    wanted = range(window.first, window.last + 1)
    _require(multipliers, wanted, name, source)
    return torch.tensor([[multipliers[expert]] for expert in wanted], dtype=torch.float32, device=HOST)


def aligned(scales: Tensor) -> Tensor:
    """[experts, 1] to [experts, 1, slots]: each value at the start of its own 0x80 bytes, zeros behind it."""
    assert scales.shape == (len(scales), 1), f"[experts, 1] is laid out, not {list(scales.shape)}"
    padded = scales.new_zeros(scales.shape[0], 1, ALIGNMENT_BYTES // scales.element_size())
    padded[:, :, 0] = scales
    return padded


def _require(multipliers: Mapping[int, float], wanted: range, name: str, source: str) -> None:
    missing = [expert for expert in wanted if expert not in multipliers]
    if missing:
        raise WeightsError(
            f"missing for expert {missing[0]} ({len(missing)} of {len(wanted)} experts have none)",
            path=source,
            tensor=name,
        )

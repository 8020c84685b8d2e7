"""`hpu-engine weights`: what of a checkpoint goes where on one worker. Reads headers, no tensor."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpu_engine.contract import ExitCode

if TYPE_CHECKING:
    from hpu_engine.model.weights.name_table import StoredPart

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)

PIPED_WIDTH = 240
"""Columns where no terminal says how wide it is: a line of the table stays a line for grep."""

Size = Annotated[int, typer.Option(min=1)]


@app.command(short_help="Show which tensors of a checkpoint a worker loads, and as what.")
def weights(
    *,
    model: Annotated[Path, typer.Option(help="Directory of a Hugging Face checkpoint.")],
    tensor_parallel_size: Size = 1,
    data_parallel_size: Size = 1,
    expert_parallel_size: Size = 1,
    worker: Annotated[int, typer.Option(min=0, help="Which worker of the group.")] = 0,
    every: Annotated[
        bool, typer.Option("--all", help="Every layer and expert, not one line for all of a kind.")
    ] = False,
) -> None:
    """One line per kind of tensor: its name and shape in the checkpoint, the parameter it becomes a part of, what of it
    this worker reads, and how it is cut over workers. Names, shapes and types are checked as they are before serving.
    """
    from rich.console import Console

    from hpu_engine.model.weights.checking import check_stored
    from hpu_engine.model.weights.errors import WeightsError
    from hpu_engine.model.weights.name_table import expand
    from hpu_engine.model.weights.placement import Placement
    from hpu_engine.model.weights.safetensors_files import list_tensors
    from hpu_engine.planning import ModelConfigError, read_model_description
    from hpu_engine.planning.layout import Layout, require_valid
    from hpu_engine.planning.violations import PlanError

    layout = Layout(tensor_parallel_size, data_parallel_size, expert_parallel_size)
    if worker >= layout.cards:
        raise typer.BadParameter(f"there are workers 0 to {layout.cards - 1}", param_hint="--worker")
    try:
        description = read_model_description(model)
        require_valid(description, layout)
        table = expand(description, Placement(layout, worker))
        stored = list_tensors(model)
        check_stored(stored, table, model)
    except PlanError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.USAGE)
    except (ModelConfigError, WeightsError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.MODEL)
    lines = [_Line.of(name, part, stored[name].num_bytes, layout.expert > 1) for name, part in table.parts.items()]
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(_table(lines if every else _folded(lines)))
    read, total = sum(line.bytes_read for line in lines), sum(line.bytes_stored for line in lines)
    console.print(f"worker {worker} of {layout.cards} reads {read:,} of {total:,} bytes of weights")


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    shape: tuple[int, ...]
    parameter: str
    held: str
    cut: str
    bytes_read: int
    bytes_stored: int
    tensors: int = 1

    @classmethod
    def of(cls, name: str, part: StoredPart, stored_bytes: int, expert_parallel: bool) -> _Line:
        cut = _cut(part, expert_parallel)
        if part.region is None:
            return cls(name, part.shape, "-", "another worker's", cut, 0, stored_bytes)
        share = 1.0
        pieces = []
        for (start, stop), size in zip(part.region, part.shape, strict=True):
            pieces.append(":" if (start, stop) == (0, size) else f"{start}:{stop}")
            share *= (stop - start) / size
        row = f"[{part.row}:]" if part.row else ""
        held = f"[{', '.join(pieces)}]"
        return cls(name, part.shape, part.parameter + row, held, cut, round(stored_bytes * share), stored_bytes)


def _cut(part: StoredPart, expert_parallel: bool) -> str:
    if part.scale is not None:
        return f"{part.cut}, scale: {part.scale}"
    cut = "whole experts" if expert_parallel and part.expert is not None else str(part.cut)
    return cut if part.transform == "as stored" else f"{cut}, {part.transform}"


def _folded(lines: Iterable[_Line]) -> list[_Line]:
    """Layers and experts that are treated alike, in one line."""
    kinds: dict[tuple[object, ...], list[_Line]] = {}
    for line in lines:
        name, parameter = (re.sub(r"(layers|experts)\.\d+", r"\1.*", text) for text in (line.name, line.parameter))
        kinds.setdefault((name, parameter, line.shape, line.held, line.cut), []).append(line)
    return [
        _Line(
            str(name),
            group[0].shape,
            str(parameter),
            group[0].held,
            group[0].cut,
            sum(line.bytes_read for line in group),
            sum(line.bytes_stored for line in group),
            len(group),
        )
        for (name, parameter, *_), group in kinds.items()
    ]


def _table(lines: Iterable[_Line]) -> object:
    from rich.table import Table

    table = Table("tensors", "in the checkpoint", "shape", "becomes", "of it here", "cut", "bytes here", box=None)
    for line in lines:
        shape = "x".join(map(str, line.shape))
        cells = (str(line.tensors), line.name, shape, line.parameter, line.held, line.cut, f"{line.bytes_read:,}")
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    return table

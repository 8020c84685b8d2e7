"""A measurement as a whole: JSON that is kept, and a table that is read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from hpu_engine.bench.figures import KindFigures, Spread, WorkloadFigures


class Report(BaseModel):
    """All runs against one server. `start_up_seconds` only where the server was started for the measurement."""

    model_config = ConfigDict(frozen=True)

    name: str
    url: str
    model: str
    started_at: str
    processor: str
    start_up_seconds: float | None
    runs: tuple[WorkloadFigures, ...]

    @property
    def failed(self) -> int:
        return sum(run.failed for run in self.runs)

    @property
    def peak_memory_bytes(self) -> int | None:
        return max((run.memory_bytes for run in self.runs if run.memory_bytes is not None), default=None)


def table(reports: tuple[Report, ...]) -> Table:
    """One line per run and kind of request, reports one below the other."""
    columns = (
        "server",
        "workload",
        "kind",
        "out tok/s",
        "TTFT p50 / p99 ms",
        "ITL p50 / p99 ms",
        "memory MB",
        "ref ms",
    )
    view = Table(*columns, title="start-up: " + ", ".join(_start_up(report) for report in reports))
    for report in reports:
        for run in report.runs:
            for index, kind in enumerate(run.kinds):
                view.add_row(report.name, run.workload, *_cells(run, kind, first=index == 0))
    return view


def _cells(run: WorkloadFigures, kind: KindFigures, *, first: bool) -> tuple[str, ...]:
    failed = f" ({run.failed} failed)" if run.failed else ""
    memory = "-" if run.memory_bytes is None else f"{run.memory_bytes / 1e6:.0f}"
    return (
        kind.kind,
        f"{run.output_tokens_per_second:.1f}{failed}" if first else "",
        _pair(kind.ttft_ms),
        _pair(kind.itl_ms),
        memory if first else "",
        f"{run.reference_ms[0]:.1f} / {run.reference_ms[1]:.1f}" if first else "",
    )


def _pair(spread: Spread) -> str:
    if spread.p50 is None or spread.p99 is None:
        return "-"
    return f"{spread.p50:.1f} / {spread.p99:.1f}"


def _start_up(report: Report) -> str:
    seconds = "not measured" if report.start_up_seconds is None else f"{report.start_up_seconds:.1f} s"
    return f"{report.name} {seconds}"

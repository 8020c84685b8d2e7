"""What a person at the terminal sees: events as lines, and bars while the model loads and warms up. All on stderr."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import structlog

from hpu_engine.contract import Phase, RankState
from hpu_engine.server.pod import Pod

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REFRESH_SECONDS = 0.2
_LABELS = {
    Phase.STARTING: "Starting",
    Phase.FETCHING: "Fetching the model",
    Phase.LOADING: "Loading weights",
    Phase.CONNECTING: "Connecting to peers",
    Phase.WARMING_UP: "Warming up",
    Phase.READY: "Ready",
}


def configure_logging() -> None:
    """One line an event: time, level, what, and its facts as key=value."""
    colors = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(
                colors=colors, pad_event_to=0, pad_level=False, exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        # Looked up for each line: while bars are shown, stderr is theirs and puts lines above them.
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),
    )


async def show_progress(pod: Pod) -> None:
    """Bars until the pod is ready, drains or fails; nothing where nobody looks (the events are lines anyway)."""
    if not sys.stderr.isatty():
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        tasks: dict[int, tuple[TaskID, Phase]] = {}
        while pod.phase not in (Phase.READY, Phase.DRAINING, Phase.FAILED):
            for rank in pod.state().ranks:
                _draw(bars, tasks, rank)
            await asyncio.sleep(REFRESH_SECONDS)


def _draw(bars: Progress, tasks: dict[int, tuple[TaskID, Phase]], rank: RankState) -> None:
    """One bar a rank, begun anew with each phase."""
    label = _LABELS.get(rank.phase, str(rank.phase))
    task, phase = tasks.get(rank.rank, (None, None))
    if task is None or phase is not rank.phase:
        if task is not None:
            bars.remove_task(task)
        task = bars.add_task(f"{label} (rank {rank.rank})", total=None, count="")
        tasks[rank.rank] = (task, rank.phase)
    if rank.phase is Phase.WARMING_UP:
        warm_up = rank.warm_up
        count = f"{warm_up.done}/{warm_up.total} {warm_up.current or ''}"
        bars.update(task, completed=warm_up.done, total=warm_up.total or None, count=count)
    elif rank.total_bytes:
        count = f"{rank.loaded_bytes / 1e6:.0f}/{rank.total_bytes / 1e6:.0f} MB"
        bars.update(task, completed=rank.loaded_bytes, total=rank.total_bytes, count=count)

"""What a person at the terminal sees: events as lines, and bars while the model loads and warms up. All on stderr.

How far a start has come is in the lines, too: a log has no bars, and a terminal keeps none.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import structlog

from hpu_engine.contract import Phase, RankState
from hpu_engine.server.pod.pod import Pod
from hpu_engine.wire.messages import Progress as Reported

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

log = structlog.get_logger()

REFRESH_SECONDS = 0.2
LINE_SECONDS = 3.0
"""Within a phase a rank has a line at most this often: enough to see that it moves, few enough to keep."""
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


async def log_progress(pod: Pod) -> None:
    """A line for a rank that moved within its phase, every `LINE_SECONDS` at most, until the pod's start is over."""
    said: dict[int, str | None] = {}
    said_at = dict.fromkeys((rank.number for rank in pod.ranks), time.monotonic())
    while _is_starting(pod):
        now = time.monotonic()
        for rank in pod.ranks:
            # The last report is old once the rank is in another phase, which has its own line.
            progress = rank.progress
            line = _line(progress) if progress is not None and progress.phase is rank.phase else None
            if line is not None and line != said.get(rank.number) and now - said_at[rank.number] >= LINE_SECONDS:
                log.info(line, rank=rank.number)
                said[rank.number], said_at[rank.number] = line, now
        await asyncio.sleep(REFRESH_SECONDS)


def _is_starting(pod: Pod) -> bool:
    return pod.phase not in (Phase.READY, Phase.DRAINING, Phase.FAILED)


def _line(progress: Reported) -> str | None:
    """`WarmingUp 3/7 tokens=64`, `Loading 512/2048 MB`, `Starting compiling kernels`; None where nothing is counted."""
    words = [str(progress.phase)]
    if progress.total and progress.phase is Phase.WARMING_UP:
        words.append(f"{progress.done}/{progress.total}")
    elif progress.total:
        words.append(f"{progress.done / 1e6:.0f}/{progress.total / 1e6:.0f} MB")
    if progress.current is not None:
        words.append(progress.current)
    return " ".join(words) if len(words) > 1 else None


async def show_progress(pod: Pod) -> None:
    """Bars until the pod is ready, drains or fails. None without a terminal: the events are lines anyway."""
    if not sys.stderr.isatty():
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        tasks: dict[int, tuple[TaskID, Phase]] = {}
        while _is_starting(pod):
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

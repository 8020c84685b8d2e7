"""What one worker said last: how far its start is, whether it lives, what it runs. Only `take` changes it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from hpu_engine.contract import BucketRun, GateResult, Phase, WarmUp, WorkerState
from hpu_engine.wire.messages import Fatal, Heartbeat, Loaded, Progress, Ready, ToServer

_ORDER = (Phase.STARTING, Phase.FETCHING, Phase.LOADING, Phase.CONNECTING, Phase.WARMING_UP, Phase.READY)


def furthest_behind(phases: Iterable[Phase]) -> Phase:
    """The first of these phases on the way to an answer."""
    return min(phases, key=_ORDER.index)


class WorkerView:
    """`messages_seen` growing is the worker's sign of life; `progress_at` is when its start or its steps last moved."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.phase = Phase.STARTING
        self.messages_seen = 0
        self.progress_at = time.monotonic()
        self.progress: Progress | None = None
        self.limits: Loaded | None = None
        self.gate: GateResult | None = None
        self.bucket: str | None = None
        self.beat: Heartbeat | None = None
        self.last_words: Fatal | None = None
        self._beat_at: float | None = None
        self._by_phase: dict[Phase, Progress] = {}
        self._runs: list[BucketRun] = []

    def take(self, message: ToServer) -> None:
        self.messages_seen += 1
        match message:
            case Heartbeat():
                self._take_heartbeat(message)
            case Progress():
                self._take_progress(message)
            case Loaded():
                self.progress_at = time.monotonic()
                self.limits = message
            case Ready():
                self.progress_at = time.monotonic()
                self.phase = Phase.READY
                self.gate = message.gate
            case Fatal():
                self.last_words = message

    def _take_heartbeat(self, beat: Heartbeat) -> None:
        now = time.monotonic()
        if self.beat is None or beat.steps != self.beat.steps:
            self.progress_at = now
        self.beat, self._beat_at = beat, now
        self.bucket = beat.bucket or self.bucket

    def _take_progress(self, progress: Progress) -> None:
        self.progress_at = time.monotonic()
        self.phase = progress.phase
        self.progress = self._by_phase[progress.phase] = progress
        if progress.phase is Phase.WARMING_UP:
            self.bucket = progress.current
        if progress.ran is not None:
            self._runs.append(progress.ran)

    @property
    def place(self) -> tuple[int, int]:
        """How far its start is; comparable between workers of a rank."""
        reported = self._by_phase.get(self.phase)
        return _ORDER.index(self.phase), reported.done if reported else 0

    @property
    def heartbeat_age_seconds(self) -> float | None:
        return None if self._beat_at is None else time.monotonic() - self._beat_at

    def bytes_in(self, phase: Phase) -> tuple[int, int] | None:
        """Done and total while fetching or loading; None before that phase."""
        reported = self._by_phase.get(phase)
        return (reported.done, reported.total) if reported else None

    def warm_up(self) -> WarmUp:
        reported = self._by_phase.get(Phase.WARMING_UP)
        if reported is None:
            return WarmUp()
        known = [run.compiled for run in self._runs if run.compiled is not None]
        return WarmUp(
            done=reported.done,
            total=reported.total,
            current=reported.current,
            planned_seconds=reported.planned_seconds,
            compiled=sum(known) if known else None,
            runs=tuple(self._runs),
        )

    def state(self) -> WorkerState:
        return WorkerState(
            worker=self.number,
            phase=self.phase,
            heartbeat_age_seconds=self.heartbeat_age_seconds,
            card=self.beat.card if self.beat else None,
        )

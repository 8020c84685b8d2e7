"""One data-parallel rank as the server sees it: what its worker said last, and the sequences it works on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import structlog

from hpu_engine.contract import Phase, RankState, TerminationMessage, WarmUp
from hpu_engine.server.errors import ApiError
from hpu_engine.server.metrics import RankMetrics
from hpu_engine.server.pod.termination import in_words
from hpu_engine.server.requests.sequence import ServedSequence
from hpu_engine.wire.framing import ServerConnection
from hpu_engine.wire.messages import (
    Abort,
    Fatal,
    Heartbeat,
    Loaded,
    Progress,
    Ready,
    Rejected,
    StepOutputs,
    Submit,
    ToServer,
    ToWorker,
)

log = structlog.get_logger()


class ServedRank:
    """Messages of its worker come in through `handle`; `messages_seen` growing is its sign of life."""

    def __init__(self, number: int, metrics: RankMetrics) -> None:
        self.number = number
        self.metrics = metrics
        self.phase = Phase.STARTING
        self.limits: Loaded | None = None
        self.last_words: TerminationMessage | None = None
        self.messages_seen = 0
        self.became_ready = asyncio.Event()
        self.progress_at = time.monotonic()
        self.progress: Progress | None = None
        self.bucket: str | None = None
        self._connection: ServerConnection | None = None
        self._open: dict[str, ServedSequence] = {}
        self._beat: Heartbeat | None = None
        self._beat_at: float | None = None
        self._bytes = (0, 0)
        self._warm_up = WarmUp()
        self._error: str | None = None

    def connect(self, connection: ServerConnection) -> None:
        self._connection = connection

    # --- requests

    @property
    def open_count(self) -> int:
        return len(self._open)

    def submit(self, sequence: ServedSequence, message: Submit) -> None:
        self._open[sequence.request_id] = sequence
        self._send(message)

    def release(self, sequences: Iterable[ServedSequence]) -> None:
        """Abort those of these that still run; their blocks are free one step later."""
        running = [sequence for sequence in sequences if self._open.pop(sequence.request_id, None)]
        for sequence in running:
            sequence.abort()
        if running:
            self._send(Abort(request_ids=tuple(sequence.request_id for sequence in running)))

    def fail_all(self, error: ApiError) -> None:
        for sequence in self._open.values():
            sequence.fail(error)
        self._open.clear()

    def _send(self, message: ToWorker) -> None:
        """A worker that is gone takes nothing; its supervisor ends what is open."""
        if self._connection is not None:
            try:
                self._connection.send(message)
            except ConnectionError:
                log.debug("message not sent, the worker is gone", rank=self.number, message=type(message).__name__)

    # --- what the worker says

    def handle(self, message: ToServer) -> None:
        self.messages_seen += 1
        match message:
            case StepOutputs():
                self._take_step(message)
            case Heartbeat():
                self._take_heartbeat(message)
            case Progress():
                self._take_progress(message)
            case Loaded():
                self._move()
                self.limits = message
                self.metrics.set_cache(message.block_size, message.num_kv_blocks)
            case Ready():
                self._move(Phase.READY)
                self.became_ready.set()
            case Rejected():
                self._take_rejection(message)
            case Fatal():
                self._take_last_words(message)

    def _take_step(self, step: StepOutputs) -> None:
        self.metrics.see_step(step)
        began = time.monotonic() - step.step_seconds
        for request_id in step.begun:
            if (sequence := self._open.get(request_id)) is not None:
                sequence.begin(began)
        stopped = []
        for row in step.rows:
            if (sequence := self._open.get(row.request_id)) is None:
                continue  # aborted while the step ran: surplus tokens, dropped and not counted
            sequence.take(row)
            if not sequence.is_open:
                del self._open[row.request_id]
                if row.finish is None:
                    stopped.append(row.request_id)
        if stopped:
            self._send(Abort(request_ids=tuple(stopped)))

    def _take_heartbeat(self, beat: Heartbeat) -> None:
        if self._beat is None or beat.steps != self._beat.steps:
            self._move()
        self._beat = beat
        self._beat_at = time.monotonic()
        self.bucket = beat.bucket or self.bucket
        self.metrics.see_heartbeat(beat)

    def _take_progress(self, progress: Progress) -> None:
        self._move(progress.phase)
        self.progress = progress
        if progress.phase is Phase.WARMING_UP:
            self._warm_up = WarmUp(done=progress.done, total=progress.total, current=progress.current)
            self.bucket = progress.current
        else:
            self._bytes = (progress.done, progress.total)

    def _take_rejection(self, rejected: Rejected) -> None:
        sequence = self._open.pop(rejected.request_id, None)
        if sequence is None:
            return
        if rejected.internal:
            self._error = rejected.message
            log.error("a request failed", rank=self.number, error=rejected.message)
        param = sequence.prompt_field if rejected.param == "prompt" else rejected.param
        sequence.fail(ApiError(500 if rejected.internal else 400, rejected.message, param=param))

    def _take_last_words(self, fatal: Fatal) -> None:
        self.last_words = TerminationMessage(
            reason=fatal.reason,
            message=fatal.message,
            path=fatal.path,
            tensor=fatal.tensor,
            bucket=fatal.bucket,
            rank=self.number,
            worker=0,
        )

    def _move(self, phase: Phase | None = None) -> None:
        self.progress_at = time.monotonic()
        if phase is not None and phase is not self.phase:
            self.phase = phase
            log.info("phase", rank=self.number, phase=str(phase))

    # --- what others may know

    def fail(self, evidence: TerminationMessage) -> None:
        self.phase = Phase.FAILED
        self._error = in_words(evidence)

    @property
    def is_serving(self) -> bool:
        return self.phase is Phase.READY

    @property
    def heartbeat_age_seconds(self) -> float | None:
        return None if self._beat_at is None else time.monotonic() - self._beat_at

    def state(self) -> RankState:
        beat = self._beat
        return RankState(
            rank=self.number,
            phase=self.phase,
            heartbeat_age_seconds=self.heartbeat_age_seconds,
            warm_up=self._warm_up,
            loaded_bytes=self._bytes[0],
            total_bytes=self._bytes[1],
            running=beat.running if beat else 0,
            waiting=beat.waiting if beat else 0,
            kv_blocks_total=beat.kv_blocks_total if beat else self.limits.num_kv_blocks if self.limits else 0,
            kv_blocks_used=beat.kv_blocks_used if beat else 0,
            first_seen_shapes=beat.first_seen_shapes if beat else 0,
            last_error=self._error,
        )

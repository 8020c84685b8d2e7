"""One data-parallel rank as the server sees it: its workers together, the way to the first one, its open sequences."""

from __future__ import annotations

import asyncio
from functools import reduce

import structlog

from hpu_engine.contract import Phase, RankState, RecipeCache, TerminationMessage
from hpu_engine.server.metrics import RankMetrics
from hpu_engine.server.pod.termination import in_words
from hpu_engine.server.pod.worker_view import WorkerView, furthest_behind
from hpu_engine.server.requests.open_sequences import OpenSequences
from hpu_engine.wire.framing import ServerConnection
from hpu_engine.wire.messages import Heartbeat, Loaded, Progress, Rejected, StepOutputs, ToServer, ToWorker

log = structlog.get_logger()


class ServedRank:
    """A rank is as far as the slowest of its workers. The first one runs the steps and is told of requests."""

    def __init__(self, number: int, metrics: RankMetrics, num_workers: int = 1) -> None:
        self.number = number
        self.metrics = metrics
        self.workers = tuple(WorkerView(worker) for worker in range(num_workers))
        self.sequences = OpenSequences(self._send)
        self.phase = Phase.STARTING
        self.limits: Loaded | None = None
        """What all of its workers hold, once the last one has loaded."""
        self.became_ready = asyncio.Event()
        self._first_worker: ServerConnection | None = None
        self._error: str | None = None

    def connect(self, first_worker: ServerConnection) -> None:
        self._first_worker = first_worker

    def _send(self, message: ToWorker) -> None:
        """A worker that is gone takes nothing; its supervisor ends what is open."""
        if self._first_worker is not None:
            try:
                self._first_worker.send(message)
            except ConnectionError:
                log.debug("message not sent, the worker is gone", rank=self.number, message=type(message).__name__)

    # --- what moves it

    def handle(self, worker: WorkerView, message: ToServer) -> None:
        worker.take(message)
        match message:
            case StepOutputs():
                self.metrics.see_step(message)
                self.sequences.take_step(message)
            case Heartbeat() if worker is self.workers[0]:
                self.metrics.see_heartbeat(message)
            case Rejected():
                if self.sequences.take_rejection(message):
                    self._error = message.message
                    log.error("a request failed", rank=self.number, error=message.message)
            case Loaded():
                self._settle_limits()
        self._follow()

    def _settle_limits(self) -> None:
        loaded = [worker.limits for worker in self.workers if worker.limits is not None]
        if len(loaded) == len(self.workers):
            self.limits = reduce(Loaded.within, loaded)
            self.metrics.set_cache(self.limits.block_size, self.limits.num_kv_blocks)

    def _follow(self) -> None:
        """Be where the slowest worker is."""
        phase = furthest_behind(worker.phase for worker in self.workers)
        if phase is not self.phase and self.phase is not Phase.FAILED:
            self.phase = phase
            log.info("phase", rank=self.number, phase=str(phase))
            if phase is Phase.READY:
                self.became_ready.set()

    def fail(self, evidence: TerminationMessage) -> None:
        self.phase = Phase.FAILED
        self._error = in_words(evidence)

    # --- what others may know

    @property
    def is_serving(self) -> bool:
        return self.phase is Phase.READY

    @property
    def slowest(self) -> WorkerView:
        return min(self.workers, key=lambda worker: worker.place)

    @property
    def progress(self) -> Progress | None:
        return self.slowest.progress

    @property
    def progress_at(self) -> float:
        """When the workers that the others wait for last moved: of several the one that has not moved for longest."""
        behind = self.slowest.phase
        return min(worker.progress_at for worker in self.workers if worker.phase is behind)

    def state(self) -> RankState:
        beat, limits = self.workers[0].beat, self.limits
        ages = [worker.heartbeat_age_seconds for worker in self.workers]
        loading = [of_worker for worker in self.workers if (of_worker := worker.bytes_in(Phase.LOADING)) is not None]
        return RankState(
            rank=self.number,
            phase=self.phase,
            heartbeat_age_seconds=max((age for age in ages if age is not None), default=None),
            warm_up=self.slowest.warm_up(),
            loaded_bytes=sum(done for done, _ in loading),
            total_bytes=sum(total for _, total in loading),
            running=beat.running if beat else 0,
            waiting=beat.waiting if beat else 0,
            kv_blocks_total=beat.kv_blocks_total if beat else limits.num_kv_blocks if limits else 0,
            kv_blocks_used=beat.kv_blocks_used if beat else 0,
            first_seen_shapes=beat.first_seen_shapes if beat else 0,
            last_error=self._error,
            workers=tuple(worker.state() for worker in self.workers),
            settled_digest=limits.settled_digest if limits else None,
            recipe_cache=self._recipe_cache(),
        )

    def _recipe_cache(self) -> RecipeCache | None:
        """Over its workers, which share the folder; None where none has said anything."""
        known = [worker.beat.recipe_cache for worker in self.workers if worker.beat and worker.beat.recipe_cache]
        if not known:
            return None
        return RecipeCache(
            hits=sum(cache.hits for cache in known),
            misses=sum(cache.misses for cache in known),
            bytes=max((cache.bytes for cache in known if cache.bytes is not None), default=None),
        )

"""All worker processes of a pod: they begin together and end together. One that is lost ends the pod."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from hpu_engine.contract import TerminationMessage
from hpu_engine.server.pod.evidence import Ending, cause_of, evidence_of, is_conclusive
from hpu_engine.server.pod.served_rank import ServedRank
from hpu_engine.server.pod.supervisor import Worker
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.wire.messages import Configure

log = structlog.get_logger()

EVIDENCE_SECONDS = 0.5
"""After an ending that may be the consequence of another: how long that other one is waited for."""
STOP_SECONDS = 5.0


class Workers:
    """`run` returns with the first loss; `end` returns when no process is left."""

    def __init__(self, ranks: Sequence[ServedRank], config: EngineConfig, command: tuple[str, ...]) -> None:
        places = [(rank, view.number) for rank in ranks for view in rank.workers]
        self._workers = [
            Worker(
                rank,
                worker,
                Configure(config=config, rank=rank.number, worker=worker, pod_workers=len(places)),
                command,
            )
            for rank, worker in places
        ]
        self._running: set[asyncio.Task[Ending | None]] = set()

    async def run(self) -> TerminationMessage | None:
        """The cause of the first loss; None when all have ended as they were told to."""
        self._running = {asyncio.create_task(worker.run()) for worker in self._workers}
        endings: list[Ending] = []
        pending, until = self._running, None
        while pending:
            left = None if until is None else max(0.0, until - time.monotonic())
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            endings += [ending for task in done if (ending := task.result()) is not None]
            if endings and (not done or is_conclusive(endings)):
                break
            if endings and until is None:
                until = time.monotonic() + EVIDENCE_SECONDS
        if not endings:
            return None
        cause = cause_of(endings)
        for other in map(evidence_of, endings):
            if other != cause:
                log.warning("followed", rank=other.rank, worker=other.worker, error=other.message)
        return cause

    async def end(self, *, at_ease: bool) -> None:
        """Tell all to leave, and kill what is left: `at_ease` after a moment, for those that listen."""
        for worker in self._workers:
            worker.stop()
        if at_ease and self._running:
            await asyncio.wait(self._running, timeout=STOP_SECONDS)
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*self._running, return_exceptions=True)

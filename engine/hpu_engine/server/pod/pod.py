"""The pod as a whole: which phase it is in, whether it lives, whether it is ready, and why not. Read by every probe.

The phase is that of the rank that is furthest behind, unless the pod drains or has failed. A pod fails once: the first
evidence is the one that is kept. It is ready only with its whole group.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import reduce

import structlog

from hpu_engine import __version__
from hpu_engine.contract import (
    ControlState,
    GateResult,
    GroupMember,
    ModelIdentity,
    Phase,
    PlanInput,
    TerminationMessage,
)
from hpu_engine.server.pod.peers import Peers
from hpu_engine.server.pod.served_rank import ServedRank
from hpu_engine.server.pod.termination import in_words
from hpu_engine.server.pod.worker_view import furthest_behind
from hpu_engine.wire.messages import Loaded

log = structlog.get_logger()

HEARTBEAT_STALE_SECONDS = 10.0
START_UP_STALLED_SECONDS = 900.0
"""Liveness only: longer than the longest single step of a start, which is one large recipe being compiled."""


class Pod:
    def __init__(
        self,
        ranks: Sequence[ServedRank],
        identity: ModelIdentity,
        plan_input: PlanInput,
        member: GroupMember | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.peers = Peers()
        self.peers_are_idle = asyncio.Event()
        self.peers_are_idle.set()
        self.failure: TerminationMessage | None = None
        self.has_failed = asyncio.Event()
        self._identity = identity
        self._plan_input = plan_input
        self._member = member
        self._started = time.monotonic()
        self._is_draining = False
        self._has_read_model = asyncio.Event()

    # --- what moves it

    def has_read_model(self) -> None:
        """The server has the tokenizer and the description; without them a ready worker is of no use."""
        self._has_read_model.set()

    def see_peers(self, peers: Peers) -> None:
        """What is known of the group's other pods from now on."""
        self.peers = peers
        (self.peers_are_idle.set if peers.are_idle else self.peers_are_idle.clear)()

    async def wait_until_ready(self) -> None:
        for rank in self.ranks:
            await rank.became_ready.wait()
        await self._has_read_model.wait()

    def drain(self) -> None:
        self._is_draining = True

    def fail(self, evidence: TerminationMessage) -> None:
        if self.failure is not None:
            return
        self.failure = evidence = evidence.model_copy(update={"member": self._member})
        for rank in self.ranks:
            if evidence.rank in (None, rank.number):
                rank.fail(evidence)
        where = {"rank": evidence.rank, "worker": evidence.worker}
        log.error("failed", reason=str(evidence.reason), **where, error=in_words(evidence))
        self.has_failed.set()

    # --- what it answers

    @property
    def phase(self) -> Phase:
        if self.failure is not None:
            return Phase.FAILED
        if self._is_draining:
            return Phase.DRAINING
        phase = furthest_behind(rank.phase for rank in self.ranks)
        return Phase.LOADING if phase is Phase.READY and not self._has_read_model.is_set() else phase

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def limits(self) -> Loaded | None:
        """What every rank can hold, so that a request may go to any of them; None until all have loaded."""
        loaded = [rank.limits for rank in self.ranks if rank.limits is not None]
        return reduce(Loaded.within, loaded) if len(loaded) == len(self.ranks) else None

    @property
    def identity(self) -> ModelIdentity:
        limits = self.limits
        if limits is None:
            return self._identity
        return self._identity.model_copy(
            update={
                "architecture": limits.architecture,
                "dtype": limits.dtype,
                "max_model_len": limits.most_tokens,
                "parameters": limits.parameters,
            }
        )

    def why_not_alive(self) -> str | None:
        """None while the step loops move, or the start does."""
        if self.failure is not None:
            return f"{self.failure.reason}: {in_words(self.failure)}"
        for rank in self.ranks:
            for worker in rank.workers if rank.is_serving else ():
                age = worker.heartbeat_age_seconds
                if age is not None and age > HEARTBEAT_STALE_SECONDS:
                    return f"rank {rank.number}, worker {worker.number}: no heartbeat for {age:.0f} s"
        last = self._furthest_behind()
        idle = time.monotonic() - last.progress_at
        if not last.is_serving and idle > START_UP_STALLED_SECONDS:
            return f"rank {last.number}: {last.phase} has not moved for {idle:.0f} s"
        return None

    def why_not_ready(self) -> str | None:
        """None when a request sent now would be answered."""
        if (dead := self.why_not_alive()) is not None:
            return dead
        phase = self.phase
        if phase is Phase.READY:
            return self.peers.why_not_ready()
        if phase is Phase.DRAINING:
            return "Draining: the server is shutting down"
        return f"{phase}: the model is not ready yet"

    def state(self) -> ControlState:
        now = time.monotonic()
        limits = self.limits
        plan_input = self._plan_input
        if limits is not None:
            settled = {
                "block_size": limits.block_size,
                "max_batched_tokens": limits.max_batched_tokens,
                "kv_blocks": limits.num_kv_blocks,
            }
            plan_input = plan_input.model_copy(update=settled)
        return ControlState(
            phase=self.phase,
            seconds_since_progress=now - self._furthest_behind().progress_at,
            uptime_seconds=now - self._started,
            model=self.identity,
            plan_input=plan_input,
            ranks=tuple(rank.state() for rank in self.ranks),
            last_error=self.failure,
            engine_version=__version__,
            member=self._member,
            **self._download(),
            gate=self._gate(),
        )

    def _furthest_behind(self) -> ServedRank:
        """The rank that the others wait for; of several the one that has not moved for longest."""
        behind = furthest_behind(rank.slowest.phase for rank in self.ranks)
        return min((rank for rank in self.ranks if rank.slowest.phase is behind), key=lambda rank: rank.progress_at)

    def _download(self) -> dict[str, int | None]:
        """Over all workers that fetch."""
        workers = [worker for rank in self.ranks for worker in rank.workers]
        known = [part for worker in workers if (part := worker.bytes_in(Phase.FETCHING)) is not None]
        if not known:
            return {}
        return {"downloaded_bytes": sum(done for done, _ in known), "download_bytes": sum(total for _, total in known)}

    def _gate(self) -> GateResult | None:
        """The first that was not passed, else any that was."""
        tried = [worker.gate for rank in self.ranks for worker in rank.workers if worker.gate is not None]
        return min(tried, key=lambda gate: gate.passed, default=None)

"""The pod as a whole: which phase it is in, whether it lives, whether it is ready, and why not. Read by every probe.

The phase is that of the rank that is furthest behind, unless the pod drains or has failed. A pod fails once: the first
evidence is the one that is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from hpu_engine import __version__
from hpu_engine.contract import ControlState, ModelIdentity, Phase, PlanInput, TerminationMessage
from hpu_engine.server.pod.served_rank import ServedRank
from hpu_engine.server.pod.termination import in_words

log = structlog.get_logger()

HEARTBEAT_STALE_SECONDS = 10.0
START_UP_STALLED_SECONDS = 900.0
"""Liveness only: longer than the longest single step of a start, which is one large recipe being compiled."""

_ORDER = (Phase.STARTING, Phase.FETCHING, Phase.LOADING, Phase.CONNECTING, Phase.WARMING_UP, Phase.READY)


class Pod:
    def __init__(self, ranks: Sequence[ServedRank], identity: ModelIdentity, plan_input: PlanInput) -> None:
        self.ranks = tuple(ranks)
        self.failure: TerminationMessage | None = None
        self.has_failed = asyncio.Event()
        self._identity = identity
        self._plan_input = plan_input
        self._started = time.monotonic()
        self._is_draining = False
        self._has_read_model = False

    # --- what moves it

    def has_read_model(self) -> None:
        """The server has the tokenizer and the description; without them a ready worker is of no use."""
        self._has_read_model = True

    def drain(self) -> None:
        self._is_draining = True

    def fail(self, evidence: TerminationMessage) -> None:
        if self.failure is not None:
            return
        self.failure = evidence
        for rank in self.ranks:
            if evidence.rank in (None, rank.number):
                rank.fail(evidence)
        log.error("failed", reason=str(evidence.reason), rank=evidence.rank, error=in_words(evidence))
        self.has_failed.set()

    # --- what it answers

    @property
    def phase(self) -> Phase:
        if self.failure is not None:
            return Phase.FAILED
        if self._is_draining:
            return Phase.DRAINING
        phase = min((rank.phase for rank in self.ranks), key=_ORDER.index)
        return Phase.LOADING if phase is Phase.READY and not self._has_read_model else phase

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def identity(self) -> ModelIdentity:
        limits = self.ranks[0].limits
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
            if rank.is_serving:
                age = rank.heartbeat_age_seconds
                if age is not None and age > HEARTBEAT_STALE_SECONDS:
                    return f"rank {rank.number}: no heartbeat for {age:.0f} s"
            elif (idle := time.monotonic() - rank.progress_at) > START_UP_STALLED_SECONDS:
                return f"rank {rank.number}: {rank.phase} has not moved for {idle:.0f} s"
        return None

    def why_not_ready(self) -> str | None:
        """None when a request sent now would be answered."""
        if (dead := self.why_not_alive()) is not None:
            return dead
        phase = self.phase
        if phase is Phase.READY:
            return None
        if phase is Phase.DRAINING:
            return "Draining: the server is shutting down"
        return f"{phase}: the model is not ready yet"

    def state(self) -> ControlState:
        now = time.monotonic()
        limits = self.ranks[0].limits
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
            seconds_since_progress=now - min(rank.progress_at for rank in self.ranks),
            uptime_seconds=now - self._started,
            model=self.identity,
            plan_input=plan_input,
            ranks=tuple(rank.state() for rank in self.ranks),
            last_error=self.failure,
            engine_version=__version__,
        )

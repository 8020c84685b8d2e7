"""Asks control endpoints in the background, so that a reconcile never waits for one.

A reconcile says which pods matter for its object; this keeps their last answers and adds the object to the queue when
an answer differs in substance: a phase, a count of shapes, reachability. A pod that is starting is asked every second,
one that is ready every fifteen; with very many pods less often, so that the total stays bounded.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hpu_engine.contract import ControlState, Phase
from hpu_operator.control_client import ControlClient
from hpu_operator.domain.diagnosis.progress import STALLED_AFTER_SECONDS, is_lasting, probe_is_due, warm_up
from hpu_operator.domain.observed import Control, Unreachable
from hpu_operator.metrics import Metrics
from hpu_operator.runtime.key import Key

STARTING_SECONDS = 1.0
READY_SECONDS = 15.0
_AT_ONCE = 32
_PER_SECOND = 100


@dataclass(frozen=True)
class Target:
    """One pod to ask. `incarnation` changes when its container restarts, and with it the answer is forgotten."""

    uid: str
    url: str
    incarnation: int


@dataclass
class _Asked:
    key: Key
    target: Target
    answer: Control = None
    silent_since: float | None = None
    due: float = 0.0


class ControlWatch:
    """`on_news` is called with the key of the object whose pod said something new."""

    def __init__(
        self, client: ControlClient, metrics: Metrics, clock: Callable[[], float], on_news: Callable[[Key], None]
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._clock = clock
        self._on_news = on_news
        self._asked: dict[str, _Asked] = {}
        self._of_key: dict[Key, set[str]] = {}
        self._heap: list[tuple[float, str]] = []
        self._changed = asyncio.Event()
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def expect(self, key: Key, targets: Iterable[Target]) -> None:
        """Ask these pods for `key`, and none of those named before that are not among them."""
        wanted = {target.uid: target for target in targets}
        for uid in self._of_key.get(key, set()) - set(wanted):
            self._asked.pop(uid, None)
        for uid, target in wanted.items():
            known = self._asked.get(uid)
            if known is None or known.target != target:
                self._asked[uid] = _Asked(key, target)
                self._schedule(uid, 0.0)
        if wanted:
            self._of_key[key] = set(wanted)
        else:
            self._of_key.pop(key, None)

    def answer(self, uid: str) -> Control:
        """The last answer of a pod; None before the first."""
        known = self._asked.get(uid)
        return known.answer if known else None

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            while True:
                pause = self._start_due()
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), pause)
                except TimeoutError:
                    continue
        finally:
            for task in self._tasks:
                task.cancel()

    def _schedule(self, uid: str, delay: float) -> None:
        due = self._clock() + delay
        self._asked[uid].due = due
        heapq.heappush(self._heap, (due, uid))
        self._changed.set()

    def _start_due(self) -> float | None:
        now = self._clock()
        while self._heap:
            due, uid = self._heap[0]
            asked = self._asked.get(uid)
            if asked is not None and asked.due == due:
                if due > now:
                    return due - now
                task = asyncio.create_task(self._ask(asked))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            heapq.heappop(self._heap)
        return None

    async def _ask(self, asked: _Asked) -> None:
        async with self._limit:
            answer = await self._client.read(asked.target.url)
        self._metrics.control_requests.labels("unreachable" if isinstance(answer, Unreachable) else "ok").inc()
        uid = asked.target.uid
        if self._asked.get(uid) is not asked:
            return
        timed = self._timed(asked, answer)
        news = _substance(asked.answer) != _substance(timed)
        asked.answer = timed
        self._schedule(uid, self._interval(answer))
        if news:
            self._on_news(asked.key)

    def _timed(self, asked: _Asked, answer: ControlState | Unreachable) -> ControlState | Unreachable:
        """`answer`, with the length of a silence in it."""
        if not isinstance(answer, Unreachable):
            asked.silent_since = None
            return answer
        if asked.silent_since is None:
            asked.silent_since = self._clock()
        return replace(answer, for_seconds=self._clock() - asked.silent_since)

    def _interval(self, answer: Control) -> float:
        ready = isinstance(answer, ControlState) and answer.phase is Phase.READY
        return max(READY_SECONDS if ready else STARTING_SECONDS, len(self._asked) / _PER_SECOND)


def _substance(answer: Control) -> object:
    """What of an answer can change a decision or a status."""
    if isinstance(answer, ControlState):
        stalled = answer.seconds_since_progress >= STALLED_AFTER_SECONDS
        loaded = sum(rank.loaded_bytes for rank in answer.ranks)
        return answer.phase, warm_up(answer), stalled, loaded, probe_is_due(answer), answer.last_error
    return isinstance(answer, Unreachable) and is_lasting(answer)

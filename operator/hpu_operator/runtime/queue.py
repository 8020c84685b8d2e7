"""Which object is to be reconciled next: a queue of keys without duplicates, with delays and a back-off per key.

A key that is added while it is being worked on is worked on again afterwards, never twice at the same time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from hpu_operator.metrics import Metrics
from hpu_operator.runtime.jitter import jittered
from hpu_operator.runtime.key import Key

FIRST_RETRY_SECONDS = 0.2
UNAVAILABLE_LIMIT_SECONDS = 5.0
"""Longest pause while the API server does not answer: it is usually back soon."""

FAILURE_LIMIT_SECONDS = 300.0


class Queue:
    """`clock` gives seconds that only grow, such as `time.monotonic`.

    A key is in at most one of three places: delayed (in the heap, with its time in `_due`), ready (in order), or
    running; a running key may also be marked to come again.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._ready: dict[Key, None] = {}
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def add(self, key: Key, delay_seconds: float = 0.0) -> None:
        """Work on `key` after `delay_seconds` at the latest; an earlier appointment stands."""
        if key in self._ready or key in self._again:
            return
        due = self._clock() + delay_seconds
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, key))
        self._changed.set()

    async def take(self) -> Key | None:
        """The next key that is due and not being worked on; None once the queue is closed."""
        while not self._closed:
            pause = self._advance()
            if self._ready:
                key = next(iter(self._ready))
                del self._ready[key]
                self._running.add(key)
                return key
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), pause)
            except TimeoutError:
                continue
        return None

    def _advance(self) -> float | None:
        """Move what is due from delayed to ready. Returns seconds until the next is due."""
        now = self._clock()
        pause = None
        while self._heap:
            due, key = self._heap[0]
            if self._due.get(key) == due:
                if due > now:
                    pause = due - now
                    break
                del self._due[key]
                if key in self._running:
                    self._again.add(key)
                else:
                    self._ready[key] = None
            heapq.heappop(self._heap)
        self._metrics.queue_depth.set(len(self._ready))
        return pause

    def done(self, key: Key) -> None:
        """Work on `key` went well."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: Key, limit_seconds: float) -> float:
        """Work on `key` failed: retry with twice the delay each time. Returns the delay."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = jittered(min(FIRST_RETRY_SECONDS * float(2 ** min(count, 16)), limit_seconds))
        self._release(key)
        self.add(key, delay)
        return delay

    def _release(self, key: Key) -> None:
        self._running.discard(key)
        if key in self._again:
            self._again.discard(key)
            self._due.pop(key, None)
            self._ready[key] = None
        self._changed.set()

    @property
    def idle(self) -> bool:
        """Whether nothing is ready or running. Delayed keys do not count."""
        self._advance()
        return not self._ready and not self._running

    def close(self) -> None:
        """No key is handed out any more."""
        self._closed = True
        self._changed.set()

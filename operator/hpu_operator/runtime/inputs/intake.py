"""How the world comes in: watch events and lists into the cache, and their keys into the queue.

The first lists come before the first reconcile: with half of the children known, the other half would be written again.
Later lists ("sweeps") find what a cut watch never told: they follow every re-list of kopf's, which it does not announce
but which shows as events without a type, and come every ten minutes in any case. One comes soon after the start: what
is deleted between our first list and kopf's is in neither, and a list of nothing shows no events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import structlog

from hpu_operator.kube.kinds import INFERENCE, WATCHED, Kind
from hpu_operator.kube.port import KubeApi, KubeError
from hpu_operator.metrics import Metrics
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.jitter import jittered
from hpu_operator.runtime.key import Key
from hpu_operator.runtime.queue import Queue

RESYNC_SECONDS = 600.0
SETTLE_SECONDS = 5.0
"""From the last event of a re-list to the sweep."""

FIRST_SWEEP_SECONDS = 15.0
"""From the first lists to the first sweep: by then kopf watches."""

CHILD_DEBOUNCE_SECONDS = 0.02
"""Events of children come in bursts; a change of the object itself is handled at once."""

_log = structlog.get_logger(__name__)


class Intake:
    """`clock` gives seconds that only grow."""

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        queue: Queue,
        *,
        scopes: Iterable[str | None],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._cache = cache
        self._queue = queue
        self._scopes = tuple(scopes)
        self._metrics = metrics
        self._clock = clock
        self._sweep_at = dict.fromkeys(WATCHED, float("inf"))

    async def fill(self) -> None:
        """The first lists, then every object into the queue. Raises `KubeError`."""
        await asyncio.gather(*(self._list(kind) for kind in WATCHED))
        for key in self._cache.inferences():
            self._queue.add(key)
        self._sweep_at = dict.fromkeys(WATCHED, self._clock() + FIRST_SWEEP_SECONDS)

    def event(self, kind: Kind, type_: str | None, live: Mapping[str, Any]) -> None:
        """One event of a watch. Type None: part of a list."""
        self._metrics.event_seen(kind.plural)
        if type_ is None:
            # Of every kind: what cut one watch has likely cut all, and a list that is empty by now shows as no event.
            soon = self._clock() + SETTLE_SECONDS
            self._sweep_at = {each: min(soon, due) for each, due in self._sweep_at.items()}
        key = self._cache.remove(kind, live) if type_ == "DELETED" else self._cache.put(kind, live)
        if key is not None:
            self._queue.add(key, 0.0 if kind is INFERENCE else CHILD_DEBOUNCE_SECONDS)

    async def sweep(self) -> None:
        """Compare the cache with the API server when it is time, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            await self.sweep_due()

    async def sweep_due(self) -> None:
        """One look at the clock: lists the kinds whose time has come."""
        for kind in WATCHED:
            self._metrics.cached(kind.plural, self._cache.count(kind))
            if self._clock() < self._sweep_at[kind]:
                continue
            self._sweep_at[kind] = self._clock() + jittered(RESYNC_SECONDS)
            try:
                await self._list(kind)
            except KubeError as error:
                _log.warning("sweep failed", kind=kind.kind, error=str(error))
                self._sweep_at[kind] = self._clock() + SETTLE_SECONDS

    async def _list(self, kind: Kind) -> None:
        news: set[Key] = set()
        for scope in self._scopes:
            news |= self._cache.replace(kind, scope, await self._api.list(kind, scope))
        for key in news:
            self._queue.add(key)
        self._metrics.cached(kind.plural, self._cache.count(kind))

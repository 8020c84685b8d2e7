"""Writes status: only when it differs, transitions at once, progress at most every ten seconds per object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpu_operator.api import schema
from hpu_operator.domain.status.document import only_progress
from hpu_operator.kube.kinds import INFERENCE
from hpu_operator.kube.port import KubeApi, Live, NotFound
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.key import Key
from hpu_operator.runtime.outputs.journal import tell_conditions

PROGRESS_SECONDS = 10.0


class StatusWriter:
    """`clock` gives seconds that only grow."""

    def __init__(self, api: KubeApi, cache: Cache, clock: Callable[[], float]) -> None:
        self._api = api
        self._cache = cache
        self._clock = clock
        self._written_at: dict[Key, float] = {}

    def forget(self, key: Key) -> None:
        self._written_at.pop(key, None)

    async def write(self, parent: Live, status: Mapping[str, Any]) -> float | None:
        """Write `status` where it differs. Returns seconds after which a progress that was held back may be written."""
        key = Key(parent["metadata"]["namespace"], parent["metadata"]["name"])
        live = parent.get("status") or {}
        if live == status:
            return None
        if only_progress(live, status):
            wait = self._written_at.get(key, -PROGRESS_SECONDS) + PROGRESS_SECONDS - self._clock()
            if wait > 0:
                return wait
        manifest = {
            "apiVersion": f"{schema.GROUP}/{schema.VERSION}",
            "kind": schema.KIND,
            # The uid keeps it from becoming the first status of a new object of the same name.
            "metadata": {"namespace": key.namespace, "name": key.name, "uid": parent["metadata"]["uid"]},
            "status": status,
        }
        try:
            self._cache.put(INFERENCE, await self._api.apply_status(INFERENCE, manifest))
        except NotFound:
            return None
        self._written_at[key] = self._clock()
        tell_conditions(key, live, status)
        return None

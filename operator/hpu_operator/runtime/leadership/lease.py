"""Leadership by a Lease, and nothing else decides who works.

The holder renews every `RENEW_SECONDS`; a candidate takes over when the holder has not renewed for the lease's duration
*as this candidate has seen it*, so clocks of two machines are never compared. A holder that could not renew for
`DEADLINE_SECONDS` starts nothing and writes nothing, because another may have taken over; when the server answers
again it either still holds the lease and goes on, or has lost it, and losing ends the process. So an outage of the API
server, during which no process can take over, costs no restart.

An identity that was given (a pod's name) belongs to one process at a time: a container that is restarted in the same
pod takes its predecessor's lease at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import structlog

from hpu_operator.kube.kinds import LEASE
from hpu_operator.kube.port import Conflict, KubeApi, KubeError
from hpu_operator.runtime.jitter import jittered

DURATION_SECONDS = 15
DEADLINE_SECONDS = 10.0
"""A holder that has not renewed for this long pauses, before a candidate may take over."""

RENEW_SECONDS = 3.0
RETRY_SECONDS = 2.0

_log = structlog.get_logger(__name__)


class Lease:
    """One candidate. `clock` gives seconds that only grow."""

    def __init__(self, api: KubeApi, namespace: str, name: str, identity: str, clock: Callable[[], float]) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0
        self._renewed_at = 0.0
        self._renewed = asyncio.Event()

    async def acquire(self) -> None:
        """Return once this process holds the lease. Never raises `KubeError`: it keeps trying."""
        while True:
            try:
                if await self._try():
                    _log.info("lease acquired", identity=self._identity)
                    return
            except KubeError as error:
                _log.warning("lease not acquired", error=str(error))
            await asyncio.sleep(jittered(RETRY_SECONDS))

    async def hold(self) -> None:
        """Renew until another process holds the lease; then return."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                if not await asyncio.wait_for(self._try(), DEADLINE_SECONDS):
                    _log.error("lease lost: another process holds it")
                    return
            except (KubeError, TimeoutError) as error:
                _log.warning("lease not renewed", error=str(error))

    @property
    def is_confirmed(self) -> bool:
        """Whether the lease was renewed in time, so that no other process can hold it."""
        return self._clock() - self._renewed_at < DEADLINE_SECONDS

    async def confirmed(self) -> None:
        """Return at once while the lease was renewed in time, else when it has been renewed again."""
        while not self.is_confirmed:
            self._renewed.clear()
            await self._renewed.wait()

    async def release(self) -> None:
        """Let another candidate take over at once."""
        try:
            live = await self._api.get(LEASE, self._namespace, self._name)
            if live and live["spec"].get("holderIdentity") == self._identity:
                spec = {**live["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace(LEASE, self._namespace, self._name, {**live, "spec": spec})
        except KubeError as error:
            _log.warning("lease not released", error=str(error))

    async def _try(self) -> bool:
        """Take or renew the lease; False where another process holds it."""
        began = self._clock()
        live = await self._api.get(LEASE, self._namespace, self._name)
        try:
            if live is None:
                await self._api.create(LEASE, self._namespace, self._manifest())
            elif not self._may_take(live):
                return False
            else:
                spec = self._spec(live["spec"])
                await self._api.replace(LEASE, self._namespace, self._name, {**live, "spec": spec})
        except Conflict:
            # Another process wrote it at the same moment; the next try sees who holds it.
            return self._renewed_at > 0 and live is not None and live["spec"].get("holderIdentity") == self._identity
        self._renewed_at = began
        self._renewed.set()
        return True

    def _may_take(self, live: dict[str, Any]) -> bool:
        spec = live["spec"]
        holder = spec.get("holderIdentity") or ""
        if holder in ("", self._identity):
            return True
        seen = (holder, str(spec.get("renewTime")))
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock()
        return self._clock() - self._seen_at > float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)

    def _manifest(self) -> dict[str, Any]:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": self._spec({}),
        }

    def _spec(self, old: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        taking = old.get("holderIdentity") != self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_SECONDS,
            "renewTime": now,
            "acquireTime": now if taking else old.get("acquireTime", now),
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (1 if taking and old else 0),
        }

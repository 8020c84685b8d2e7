"""The API server as a leader may use it: reading always, writing only while the lease is confirmed.

A reconcile that began in time may stand still in the middle, for an API server that does not answer; when it goes on,
another process may lead. Its next write is refused here, and the object is looked at again once the lease is confirmed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpu_operator.kube.kinds import Kind
from hpu_operator.kube.port import KubeApi, Listed, Live, Unavailable
from hpu_operator.runtime.leadership.lease import Lease


class LeaderOnly:
    """A `KubeApi`. Writing raises `Unavailable` while the lease is not confirmed."""

    def __init__(self, api: KubeApi, lease: Lease) -> None:
        self._api = api
        self._lease = lease

    async def get(self, kind: Kind, namespace: str, name: str) -> Live | None:
        return await self._api.get(kind, namespace, name)

    async def list(self, kind: Kind, namespace: str | None, **selectors: str) -> Listed:
        return await self._api.list(kind, namespace, **selectors)

    async def apply(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        self._check("apply", kind)
        return await self._api.apply(kind, manifest)

    async def apply_status(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        self._check("apply status", kind)
        return await self._api.apply_status(kind, manifest)

    async def annotate(self, kind: Kind, live: Mapping[str, Any], annotations: Mapping[str, str]) -> Live:
        self._check("annotate", kind)
        return await self._api.annotate(kind, live, annotations)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self._check("delete", kind)
        await self._api.delete(kind, namespace, name, uid)

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Live:
        self._check("create", kind)
        return await self._api.create(kind, namespace, body)

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Live:
        self._check("replace", kind)
        return await self._api.replace(kind, namespace, name, body)

    def _check(self, verb: str, kind: Kind) -> None:
        if not self._lease.is_confirmed:
            raise Unavailable(f"{verb} {kind.kind}", 0, "not sent: the lease was not renewed in time")

"""Kubernetes events for people: an object becomes ready or stops being so, fails in a new way, or gets back a child."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import structlog

from hpu_operator.api.reasons import Reason, is_failure
from hpu_operator.domain.names import MANAGER
from hpu_operator.domain.owner import Owner
from hpu_operator.domain.timestamps import timestamp
from hpu_operator.kube.kinds import EVENT, INFERENCE, Kind
from hpu_operator.kube.port import KubeApi, KubeError, Live
from hpu_operator.runtime.key import Key

REPAIRED = "Repaired"

_log = structlog.get_logger(__name__)


class Announcer:
    """An event that cannot be written is logged: it is a courtesy, status is the truth."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    async def announce(self, before: Live, status: Mapping[str, Any]) -> None:
        """Compare the Ready condition of `before` with that of the status written just now."""
        old, new = _ready(before.get("status") or {}), _ready(status)
        if not _worth_telling(old, new):
            return
        metadata = before["metadata"]
        about = Owner(metadata["namespace"], metadata["name"], metadata["uid"])
        kind = "Warning" if is_failure(Reason(new["reason"])) else "Normal"
        await self._write(about, kind, new["reason"], new["message"], metadata.get("resourceVersion"))

    async def repaired(self, about: Owner, kind: Kind, name: str) -> None:
        """A child was deleted by another client and recreated."""
        await self._write(about, "Normal", REPAIRED, f"{kind.kind} {name} was deleted and has been recreated")

    async def _write(self, about: Owner, kind: str, reason: str, message: str, version: str | None = None) -> None:
        now = timestamp(datetime.now(UTC))
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{about.name}.{uuid4().hex[:16]}", "namespace": about.namespace},
            "involvedObject": {
                **INFERENCE.type_meta,
                "name": about.name,
                "namespace": about.namespace,
                "uid": about.uid,
                **({"resourceVersion": version} if version else {}),
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": MANAGER,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._api.create(EVENT, about.namespace, body)
        except KubeError as error:
            _log.warning("event not written", object=str(Key.of(about)), error=str(error))


def _ready(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions") or () if c.get("type") == "Ready"), {})


def _worth_telling(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if (old.get("status"), old.get("reason")) == (new.get("status"), new.get("reason")):
        return False
    return old.get("status", "False") != new.get("status") or is_failure(Reason(new["reason"]))

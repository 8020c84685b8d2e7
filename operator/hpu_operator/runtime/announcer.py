"""Kubernetes events for people: one when an object becomes ready or stops being so, one when it fails in a new way."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import structlog

from hpu_operator.api.reasons import Reason, is_failure
from hpu_operator.domain.names import MANAGER
from hpu_operator.domain.status import timestamp
from hpu_operator.kube.kinds import EVENT
from hpu_operator.kube.port import KubeApi, KubeError, Live

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
        now = timestamp(datetime.now(UTC))
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{uuid4().hex[:16]}", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": before.get("apiVersion"),
                "kind": before.get("kind"),
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata.get("resourceVersion"),
            },
            "type": "Warning" if is_failure(Reason(new["reason"])) else "Normal",
            "reason": new["reason"],
            "message": new["message"][:1024],
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": MANAGER,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._api.create(EVENT, metadata["namespace"], body)
        except KubeError as error:
            _log.warning("event not written", object=f"{metadata['namespace']}/{metadata['name']}", error=str(error))


def _ready(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions") or () if c.get("type") == "Ready"), {})


def _worth_telling(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if (old.get("status"), old.get("reason")) == (new.get("status"), new.get("reason")):
        return False
    return old.get("status", "False") != new.get("status") or is_failure(Reason(new["reason"]))

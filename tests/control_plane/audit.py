"""Who wrote what, from the API server's audit log: the proof of "nothing was written"."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpu_operator.runtime.outputs.status_writer import PROGRESS_SECONDS

QUIET_SECONDS = PROGRESS_SECONDS + 2.0
"""What follows a status that a test has seen: the events that tell of it, the writes that the kubelet causes, and a
progress that was held back.
"""

_WRITES = {"create", "update", "patch", "delete", "deletecollection"}


@dataclass(frozen=True)
class Write:
    """`received` and `answered` are times of the API server's clock."""

    verb: str
    resource: str
    name: str
    agent: str
    code: int
    received: datetime
    answered: datetime


class Audit:
    """Reads the log from where it stood when this was made."""

    def __init__(self, path: Path, namespace: str) -> None:
        self._path = path
        self._namespace = namespace
        self._start = path.stat().st_size

    def writes(self, agent: str = "hpu-operator/", *, leases: bool = False) -> list[Write]:
        """Writes in the namespace since then, by a user agent that starts with `agent`."""
        with self._path.open() as log:
            log.seek(self._start)
            events = [json.loads(line) for line in log if line.endswith("\n")]
        found = []
        for event in events:
            about = event.get("objectRef") or {}
            if event["verb"] not in _WRITES or about.get("namespace") != self._namespace:
                continue
            if not event.get("userAgent", "").startswith(agent) or (about["resource"] == "leases" and not leases):
                continue
            resource = "/".join(part for part in (about["resource"], about.get("subresource")) if part)
            code = int((event.get("responseStatus") or {}).get("code", 0))
            times = (datetime.fromisoformat(event[key]) for key in ("requestReceivedTimestamp", "stageTimestamp"))
            found.append(Write(event["verb"], resource, about.get("name", ""), event["userAgent"], code, *times))
        return found


async def audit_once_settled(path: Path, namespace: str, *, at_most: float = 120.0) -> Audit:
    """An audit from a moment after which an operator has written nothing for `QUIET_SECONDS`.

    Raises `AssertionError` with the last writes when it never was quiet within `at_most` seconds.
    """
    deadline = time.monotonic() + at_most
    while True:
        audit = Audit(path, namespace)
        await asyncio.sleep(QUIET_SECONDS)
        writes = audit.writes()
        if not writes:
            return audit
        assert time.monotonic() < deadline, f"no {QUIET_SECONDS:g} s without a write within {at_most:g} s: {writes}"

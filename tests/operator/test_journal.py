"""The log tells every change of a condition's reason, once, when it was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from structlog.testing import capture_logs

from hpu_operator.kube.kinds import Kind
from hpu_operator.kube.port import Live
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.outputs.status_writer import PROGRESS_SECONDS, StatusWriter


class Server:
    """Stores a status as the API server would."""

    def __init__(self) -> None:
        self.live: Live = {"metadata": {"namespace": "team", "name": "smol", "uid": "uid-1", "resourceVersion": "1"}}

    async def apply_status(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        version = str(int(self.live["metadata"]["resourceVersion"]) + 1)
        self.live = {"metadata": {**self.live["metadata"], "resourceVersion": version}, "status": manifest["status"]}
        return self.live


def status(reason: str, message: str) -> dict[str, Any]:
    return {"conditions": [{"type": "Ready", "status": "False", "reason": reason, "message": message}]}


async def test_a_change_of_reason_is_logged_with_both_reasons_and_progress_is_not() -> None:
    server, now = Server(), [0.0]
    writer = StatusWriter(server, Cache(), lambda: now[0])  # type: ignore[arg-type]
    with capture_logs() as logs:
        for reason, message in [
            ("Loading", "1 GB"),
            ("Loading", "2 GB"),
            ("ModelBroken", "cut"),
            ("ModelBroken", "cut"),
        ]:
            await writer.write(server.live, status(reason, message))
            now[0] += PROGRESS_SECONDS
    told = [(entry["object"], entry["condition"], entry["before"], entry["reason"], entry["message"]) for entry in logs]
    assert told == [
        ("team/smol", "Ready", None, "Loading", "1 GB"),
        ("team/smol", "Ready", "Loading", "ModelBroken", "cut"),
    ]
    assert {(entry["event"], entry["log_level"]) for entry in logs} == {("condition changed", "info")}

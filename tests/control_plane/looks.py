"""What tests look for in the cluster, and wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hpu_operator.kube.kinds import INFERENCE, POD, RECORD, SERVICE, STATEFUL_SET, Kind
from hpu_operator.kube.port import KubeError, Live
from tests.control_plane.admin import Admin

CHILDREN = (STATEFUL_SET, RECORD, SERVICE, POD)
PATIENCE_SECONDS = 200.0
"""For a machine with many neighbours; no test waits this long when it passes."""


async def eventually(what: str, look: Callable[[], Awaitable[Any]], so: Callable[[Any], bool] = bool) -> Any:
    """What `look` finds once it is `so`; an assertion that names it and the last look when the time is up."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    last: object = None
    while asyncio.get_running_loop().time() < deadline:
        with contextlib.suppress(KubeError):
            last = await look()
            if so(last):
                return last
        await asyncio.sleep(0.05)
    pytest.fail(f"{what}: not after {PATIENCE_SECONDS:g} s; last seen: {last!r}")


def condition(live: Live | None, kind: str) -> dict[str, Any]:
    conditions = ((live or {}).get("status") or {}).get("conditions") or []
    return next((dict(item) for item in conditions if item["type"] == kind), {})


async def ready(admin: Admin, namespace: str, name: str = "smol", *, generation: int | None = None) -> Live:
    """The object once it is Ready, of that generation where one is given."""

    def is_ready(live: Live | None) -> bool:
        found = condition(live, "Ready")
        return found.get("status") == "True" and generation in (None, found["observedGeneration"])

    live: Live = await eventually(f"{name} is Ready", lambda: admin.get(INFERENCE, namespace, name), is_ready)
    return live


async def reason(
    admin: Admin, namespace: str, expected: str, name: str = "smol", kind: str = "Ready"
) -> dict[str, Any]:
    """Wait until a condition has a reason; the condition. Names what it was instead."""

    async def look() -> dict[str, Any]:
        return condition(await admin.get(INFERENCE, namespace, name), kind)

    found: dict[str, Any] = await eventually(
        f"{name}: {kind} has the reason {expected}", look, lambda found: found.get("reason") == expected
    )
    return found


async def pods_of(admin: Admin, namespace: str) -> dict[str, str]:
    """Names and uids of the pods that are there."""
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await admin.list(POD, namespace)}


async def children_of(admin: Admin, namespace: str) -> list[Live]:
    """Everything in the namespace that an operator makes for objects."""
    return [item for kind in CHILDREN for item in await admin.list(kind, namespace)]


async def delete_and_see_it_made_again(admin: Admin, namespace: str, kind: Kind, name: str) -> None:
    """Delete a child, and wait for another of its name."""
    before = await admin.get(kind, namespace, name)
    assert before is not None, f"there is no {kind.kind} {name}"
    await admin.delete(kind, namespace, name)

    async def again() -> bool:
        found = await admin.get(kind, namespace, name)
        return found is not None and bool(found["metadata"]["uid"] != before["metadata"]["uid"])

    await eventually(f"{kind.kind} {name} made again", again)

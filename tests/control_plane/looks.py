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


async def eventually(what: str, look: Callable[[], Awaitable[Any]], seconds: float = 30.0) -> Any:
    """What `look` finds once it is true; an assertion that names it when the time is up."""
    deadline = asyncio.get_running_loop().time() + seconds
    last: object = None
    while asyncio.get_running_loop().time() < deadline:
        with contextlib.suppress(KubeError):
            last = await look()
            if last:
                return last
        await asyncio.sleep(0.05)
    pytest.fail(f"{what}: not after {seconds:g} s; last seen: {last!r}")


def condition(live: Live | None, kind: str) -> dict[str, Any]:
    conditions = ((live or {}).get("status") or {}).get("conditions") or []
    return next((dict(item) for item in conditions if item["type"] == kind), {})


async def ready(
    admin: Admin, namespace: str, name: str = "smol", *, generation: int | None = None, seconds: float = 30.0
) -> Live:
    """The object once it is Ready, of that generation where one is given."""

    async def look() -> Live | None:
        live = await admin.get(INFERENCE, namespace, name)
        found = condition(live, "Ready")
        if found.get("status") != "True" or (generation and found["observedGeneration"] != generation):
            return None
        return live

    live: Live = await eventually(f"{name} is Ready", look, seconds)
    return live


async def reason(
    admin: Admin, namespace: str, expected: str, name: str = "smol", kind: str = "Ready"
) -> dict[str, Any]:
    """Wait until a condition has a reason; the condition. Names what it was instead."""
    deadline = asyncio.get_running_loop().time() + 30
    found: dict[str, Any] = {}
    while asyncio.get_running_loop().time() < deadline:
        found = condition(await admin.get(INFERENCE, namespace, name), kind)
        if found.get("reason") == expected:
            return found
        await asyncio.sleep(0.05)
    pytest.fail(f"{name}: {kind} never had the reason {expected}; last: {found}")


async def pods_of(admin: Admin, namespace: str) -> dict[str, str]:
    """Names and uids of the pods that are there."""
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await admin.list(POD, namespace)}


async def children_of(admin: Admin, namespace: str) -> list[Live]:
    """Everything in the namespace that an operator makes for objects."""
    return [item for kind in CHILDREN for item in await admin.list(kind, namespace)]


async def delete_and_see_it_made_again(
    admin: Admin, namespace: str, kind: Kind, name: str, *, seconds: float = 30.0
) -> None:
    """Delete a child, and wait for another of its name."""
    before = await admin.get(kind, namespace, name)
    assert before is not None, f"there is no {kind.kind} {name}"
    await admin.delete(kind, namespace, name)

    async def again() -> bool:
        found = await admin.get(kind, namespace, name)
        return found is not None and bool(found["metadata"]["uid"] != before["metadata"]["uid"])

    await eventually(f"{kind.kind} {name} made again", again, seconds)

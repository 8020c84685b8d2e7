"""Waiting for an HpuInference, told from its status alone: one line whenever it says something new."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Object = dict[str, Any]

REPEAT_SECONDS = 10.0
"""A line that stays true is said again after this long, so that silence never looks like a hang."""


class NotReady(Exception):
    """The object did not become ready in time; the text is what it said last."""


def condition(item: Object, kind: str) -> Object | None:
    """The condition of that type, if there is one about the object's present generation."""
    status = item.get("status", {})
    if status.get("observedGeneration") != item["metadata"].get("generation"):
        return None
    return next((found for found in status.get("conditions", ()) if found["type"] == kind), None)


def is_ready(item: Object) -> bool:
    ready = condition(item, "Ready")
    return ready is not None and ready["status"] == "True"


def describe(item: Object | None) -> str:
    """One line: the reason of Ready, and its message."""
    if item is None:
        return "not there yet"
    ready = condition(item, "Ready")
    if ready is None:
        return "the operator has not seen this change yet"
    message = " ".join(ready.get("message", "").split())
    return f"{ready['reason']}: {message}" if message else str(ready["reason"])


def wait_until(
    read: Callable[[], Object | None],
    done: Callable[[Object], bool] = is_ready,
    *,
    timeout_seconds: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Object:
    """Poll `read` until `done`, and say what changes. Raises NotReady after `timeout_seconds`."""
    started = said_at = clock()
    said = ""
    while True:
        item, now = read(), clock()
        line = describe(item)
        if line != said or now - said_at >= REPEAT_SECONDS:
            say(f"{now - started:5.1f} s  {line}")
            said, said_at = line, now
        if item is not None and done(item):
            return item
        if now - started > timeout_seconds:
            raise NotReady(f"not ready after {timeout_seconds:.0f} s; last: {line}")
        sleep(0.25)

"""Facts about a revision's past: annotations of its ControllerRevision, whose data can never change.

A fact is written before it is acted on. Its time orders events of one object; no duration is measured with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from hpu_operator.domain.names import COMPLETED_ANNOTATION
from hpu_operator.domain.timestamps import parse_time, timestamp


@dataclass(frozen=True)
class Facts:
    """`completed`: when every group was of the revision and ready, the last time that this was news."""

    completed: datetime | None = None


def read_facts(live: Mapping[str, Any]) -> Facts:
    """The facts in a record's annotations. One that cannot be read is unknown."""
    completed = None
    with contextlib.suppress(ValueError):
        completed = parse_time((live["metadata"].get("annotations") or {}).get(COMPLETED_ANNOTATION))
    return Facts(completed if completed and completed.tzinfo else None)


def new_annotations(facts: Facts, live: Mapping[str, Any]) -> dict[str, str]:
    """The annotations that have to be written for `live` to say `facts`; empty where it does."""
    wanted = {COMPLETED_ANNOTATION: timestamp(facts.completed)} if facts.completed else {}
    present = live["metadata"].get("annotations") or {}
    return {key: value for key, value in wanted.items() if present.get(key) != value}


def last_good(known: Mapping[str, Facts]) -> str | None:
    """The revision that was completed last."""
    completed = {revision: facts.completed for revision, facts in known.items() if facts.completed}
    return max(completed, key=lambda revision: (completed[revision], revision), default=None)


def completed_now(known: Mapping[str, Facts], revision: str, now: datetime) -> Facts:
    """The facts of `revision` once it is complete: unchanged where it is the last good one already."""
    latest = last_good(known)
    if latest == revision:
        return known[revision]
    # Later than what another process wrote, whose clock may be ahead.
    before = known[latest].completed if latest else None
    return Facts(max(now, before + timedelta(seconds=1)) if before else now)

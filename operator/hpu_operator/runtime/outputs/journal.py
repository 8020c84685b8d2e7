"""The operator's log of one object: every condition whose reason changed, every child that was written or deleted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from hpu_operator.kube.kinds import Kind
from hpu_operator.runtime.key import Key

_log = structlog.get_logger(__name__)


def tell_conditions(key: Key, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Log the difference between two statuses. A changed message alone is progress and is not logged."""
    old = {condition.get("type"): condition for condition in before.get("conditions") or ()}
    for condition in after.get("conditions") or ():
        known = old.get(condition["type"], {})
        if all(known.get(part) == condition[part] for part in ("status", "reason")):
            continue
        _log.info(
            "condition changed",
            object=str(key),
            condition=condition["type"],
            status=condition["status"],
            before=known.get("reason"),
            reason=condition["reason"],
            message=condition["message"],
        )


def tell_child(what: str, kind: Kind, namespace: str, name: str) -> None:
    """Log that a child was `what`: created, recreated, repaired, rewritten by the cluster, annotated, deleted."""
    _log.info(f"child {what}", kind=kind.kind, child=f"{namespace}/{name}")

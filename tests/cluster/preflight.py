"""Says what this machine lacks for a cluster, all of it at once, before anything is made."""

from __future__ import annotations

from tests import machine
from tests.cluster.errors import MissingRequirement


def check(*, nodes: bool) -> None:
    """Raise MissingRequirement for a machine that cannot run a cluster of this size."""
    missing = machine.missing(node=nodes)
    if missing:
        raise MissingRequirement("; ".join(item.what for item in missing), "; ".join(item.remedy for item in missing))

"""Children that differ from what is applied, because the API server or a webhook of the cluster rewrites them.

Applying them again would change nothing. Kept only in memory: a new process tries once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from hpu_operator.domain.compare import digest
from hpu_operator.domain.owner import Owner
from hpu_operator.kube.kinds import Kind
from hpu_operator.kube.port import Live
from hpu_operator.runtime.key import Key

_MOVING = {"managedFields", "resourceVersion", "generation"}


class Settled:
    """One entry per child that differed after it was applied, forgotten with its object."""

    def __init__(self) -> None:
        self._seen: dict[Key, dict[tuple[Kind, str], str]] = defaultdict(dict)

    def note(self, owner: Owner, kind: Kind, manifest: Mapping[str, Any], answer: Live) -> None:
        """Applying `manifest` resulted in `answer`, which differs."""
        self._seen[Key.of(owner)][kind, manifest["metadata"]["name"]] = _both(manifest, answer)

    def knows(self, owner: Owner, kind: Kind, manifest: Mapping[str, Any], live: Live) -> bool:
        """Whether applying `manifest` is known to result in what is live."""
        known = self._seen.get(Key.of(owner), {}).get((kind, manifest["metadata"]["name"]))
        return known is not None and known == _both(manifest, live)

    def forget(self, key: Key) -> None:
        self._seen.pop(key, None)


def _both(manifest: Mapping[str, Any], live: Live) -> str:
    metadata = {key: value for key, value in live["metadata"].items() if key not in _MOVING}
    return digest(
        [manifest, metadata, {key: value for key, value in live.items() if key not in ("metadata", "status")}]
    )

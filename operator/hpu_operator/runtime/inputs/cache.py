"""The last known state of every watched object, by kind, and by the HpuInference it belongs to.

Fed by lists, watch events and the answers of our own writes, in any order: an object older than the one known is
dropped, and so is one that was deleted meanwhile. Only what is needed is kept of each.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

from hpu_operator.domain.owner import Owner, Ownership, ownership
from hpu_operator.kube.kinds import INFERENCE, POD, RECORD, Kind
from hpu_operator.kube.port import Listed, Live
from hpu_operator.runtime.key import Key, key_of

_TOMBSTONES = 10_000
_Place = tuple[str, str]
"""Namespace and name."""


class Cache:
    """Not shared between threads: everything happens on one event loop."""

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[_Place, Live]] = defaultdict(dict)
        self._children: dict[tuple[Kind, Key], dict[str, Live]] = defaultdict(dict)
        self._deleted: OrderedDict[tuple[Kind, _Place], int] = OrderedDict()

    def get(self, kind: Kind, namespace: str, name: str) -> Live | None:
        return self._objects[kind].get((namespace, name))

    def inferences(self) -> tuple[Key, ...]:
        return tuple(Key(*place) for place in self._objects[INFERENCE])

    def children(self, kind: Kind, key: Key) -> tuple[Live, ...]:
        """Objects of `kind` with the label of `key`, by name."""
        found = self._children.get((kind, key), {})
        return tuple(found[name] for name in sorted(found))

    def own(self, kind: Kind, owner: Owner) -> tuple[Live, ...]:
        """Those of them that are the object's own; those of an earlier object of its name are not."""
        return tuple(live for live in self.children(kind, Key.of(owner)) if ownership(owner, live) is Ownership.OURS)

    def count(self, kind: Kind) -> int:
        return len(self._objects[kind])

    def put(self, kind: Kind, live: Mapping[str, Any]) -> Key | None:
        """Keep `live` where it is news. Returns the key it is news for."""
        place, version = _place(live), _version(live)
        known = self._objects[kind].get(place)
        if known is not None and _version(known) >= version:
            return None
        if self._deleted.get((kind, place), -1) >= version:
            return None
        if known is not None:
            self._forget(kind, known)
        kept = _compact(kind, live)
        self._objects[kind][place] = kept
        key = key_of(kind, live)
        if key is not None and kind is not INFERENCE:
            self._children[kind, key][place[1]] = kept
        return key

    def remove(self, kind: Kind, live: Mapping[str, Any]) -> Key | None:
        """`live` was deleted. Returns the key that is news for."""
        place, version = _place(live), _version(live)
        self._bury(kind, place, version)
        known = self._objects[kind].get(place)
        if known is None or _version(known) > version:
            return None
        self._forget(kind, known)
        return key_of(kind, known)

    def replace(self, kind: Kind, namespace: str | None, listed: Listed) -> set[Key]:
        """Make the cache equal to a list that was just made. Returns the keys that is news for.

        An object missing from the list is forgotten, because a watch that was cut delivers no deletion; unless it is
        newer than the list.
        """
        seen: set[_Place] = set()
        news: set[Key] = set()
        for live in listed.items:
            seen.add(_place(live))
            if key := self.put(kind, live):
                news.add(key)
        for place, known in tuple(self._objects[kind].items()):
            missing = place not in seen and namespace in (None, place[0])
            if missing and _version(known) <= listed.version:
                self._forget(kind, known)
                if key := key_of(kind, known):
                    news.add(key)
        return news

    def _forget(self, kind: Kind, known: Live) -> None:
        place = _place(known)
        self._objects[kind].pop(place, None)
        key = key_of(kind, known)
        if key is not None and kind is not INFERENCE:
            siblings = self._children.get((kind, key), {})
            siblings.pop(place[1], None)
            if not siblings:
                self._children.pop((kind, key), None)

    def _bury(self, kind: Kind, place: _Place, version: int) -> None:
        self._deleted[kind, place] = max(version, self._deleted.get((kind, place), version))
        self._deleted.move_to_end((kind, place))
        while len(self._deleted) > _TOMBSTONES:
            self._deleted.popitem(last=False)


def _place(live: Mapping[str, Any]) -> _Place:
    return live["metadata"]["namespace"], live["metadata"]["name"]


def _version(live: Mapping[str, Any]) -> int:
    return int(live["metadata"].get("resourceVersion") or 0)


def _compact(kind: Kind, live: Mapping[str, Any]) -> Live:
    """Without field ownership, and without what is never read: a pod's spec, a child's status."""
    metadata = {key: value for key, value in live["metadata"].items() if key != "managedFields"}
    unread = {POD: "spec", INFERENCE: "", RECORD: ""}.get(kind, "status")
    return {key: value for key, value in live.items() if key not in (unread, "metadata")} | {"metadata": metadata}

"""Which children an object was seen to have, to tell a recreated one from a new one.

Only in memory: after a restart of the operator a child deleted meanwhile looks new. Nothing is decided from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hpu_operator.domain.owner import Owner
from hpu_operator.kube.kinds import Kind
from hpu_operator.kube.port import Live
from hpu_operator.runtime.key import Key


@dataclass
class _Seen:
    """Names of children, and those deleted on purpose, by uid, for as long as they are still shown as being there."""

    owner_uid: str
    names: set[tuple[Kind, str]] = field(default_factory=set)
    deleted: dict[str, Kind] = field(default_factory=dict)


class Remembered:
    """One entry per object, forgotten with it."""

    def __init__(self) -> None:
        self._seen: dict[Key, _Seen] = {}

    def see(self, owner: Owner, kind: Kind, live: Iterable[Live]) -> None:
        """All of the object's own children of one kind, as they are now."""
        seen = self._of(owner)
        there = {str(item["metadata"]["uid"]): str(item["metadata"]["name"]) for item in live}
        seen.deleted = {uid: of for uid, of in seen.deleted.items() if of is not kind or uid in there}
        seen.names |= {(kind, name) for uid, name in there.items() if uid not in seen.deleted}

    def made(self, owner: Owner, kind: Kind, name: str) -> None:
        self._of(owner).names.add((kind, name))

    def had(self, owner: Owner, kind: Kind, name: str) -> bool:
        """Whether the object had a child of that name that was not deleted on purpose."""
        return (kind, name) in self._of(owner).names

    def deleted(self, owner: Owner, kind: Kind, name: str, uid: str) -> None:
        """It was deleted on purpose: its name is free for something new."""
        seen = self._of(owner)
        seen.names.discard((kind, name))
        seen.deleted[uid] = kind

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._seen.pop(key, None)

    def _of(self, owner: Owner) -> _Seen:
        key = Key.of(owner)
        seen = self._seen.get(key)
        if seen is None or seen.owner_uid != owner.uid:
            seen = self._seen[key] = _Seen(owner.uid)
        return seen

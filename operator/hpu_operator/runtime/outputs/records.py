"""The records of one object's revisions: read, written, repaired, annotated with facts, and pruned."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hpu_operator.domain import names
from hpu_operator.domain.facts import Facts, new_annotations
from hpu_operator.domain.owner import Owner
from hpu_operator.domain.revision import (
    Record,
    expired,
    next_number,
    read_record,
    record_from_stateful_set,
    record_manifest,
)
from hpu_operator.kube.kinds import RECORD
from hpu_operator.kube.port import Live
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.outputs.children import Children


class Records:
    """Each write is in the cache at once. Writing raises what `Children` raises."""

    def __init__(self, cache: Cache, children: Children) -> None:
        self._cache = cache
        self._children = children

    def known(self, owner: Owner) -> dict[str, Record]:
        """By revision."""
        own = self._cache.own(RECORD, owner)
        return {record.revision: record for live in own if (record := read_record(live))}

    async def repair(self, owner: Owner, stateful_sets: Iterable[Live]) -> None:
        """Write a deleted record again, from a running group of its revision."""
        for item in stateful_sets:
            group, known = names.group_of(item["metadata"].get("labels") or {}), self.known(owner)
            if group is None or group.revision in known:
                continue
            if record := record_from_stateful_set(item, next_number(known.values())):
                await self._children.exists(owner, RECORD, record_manifest(owner, record))

    async def ensure(self, owner: Owner, revision: str, render: Callable[[int], Record]) -> None:
        """Write the record of `revision` unless there is one. `render` takes the record's number."""
        known = self.known(owner)
        if revision not in known:
            record = render(next_number(known.values()))
            await self._children.exists(owner, RECORD, record_manifest(owner, record))

    async def note(self, owner: Owner, revision: str, facts: Facts) -> None:
        """Write facts of a revision that has a record. Raises `Conflict` where it has just been changed."""
        live = self._live(owner, revision)
        if live is not None and (annotations := new_annotations(facts, live)):
            await self._children.annotate(RECORD, live, annotations)

    async def prune(self, owner: Owner, in_use: Iterable[str]) -> None:
        """Delete old records of revisions that are not in use."""
        for record in expired(self.known(owner).values(), in_use):
            if live := self._live(owner, record.revision):
                await self._children.delete(owner, RECORD, live["metadata"]["name"], live["metadata"]["uid"])

    def _live(self, owner: Owner, revision: str) -> Live | None:
        return self._cache.get(RECORD, owner.namespace, names.revision_record(owner.name, revision))

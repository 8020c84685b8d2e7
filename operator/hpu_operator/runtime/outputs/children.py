"""Writes children: compares before it writes, and touches nothing that is not ours.

The cache holds only objects with our label, so a name that is absent there may still be taken; it is looked up before
the first write. An object that is being deleted is left alone: an apply to it would be accepted and lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from hpu_operator.api.reasons import Reason
from hpu_operator.domain.compare import Manifest, needs_apply
from hpu_operator.domain.diagnosis.questions import Diagnosis
from hpu_operator.domain.owner import Owner, Ownership, ownership
from hpu_operator.kube.kinds import RECORD, SERVICE, STATEFUL_SET, Kind
from hpu_operator.kube.port import KubeApi, Live, NotFound, Refused
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.key import Key
from hpu_operator.runtime.outputs.announcer import Announcer
from hpu_operator.runtime.outputs.journal import tell_child
from hpu_operator.runtime.outputs.remembered import Remembered
from hpu_operator.runtime.outputs.settled import Settled


class Blocked(Exception):
    """A child cannot be written now; `diagnosis` is what the object's status says about it."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis.message)
        self.diagnosis = diagnosis


class NamespaceLeaving(Exception):
    """The namespace and everything in it is being deleted: there is nothing to do or to report."""


class Children:
    """Writes through `api` and puts every answer into `cache`. An event reports each child that is recreated."""

    def __init__(self, api: KubeApi, cache: Cache, announcer: Announcer) -> None:
        self._api = api
        self._cache = cache
        self._announcer = announcer
        self._remembered = Remembered()
        self._settled = Settled()

    def see(self, owner: Owner) -> None:
        """Remember what `owner` has now, to know later what was lost."""
        for kind in (SERVICE, RECORD, STATEFUL_SET):
            self._remembered.see(owner, kind, self._cache.own(kind, owner))

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._remembered.forget(key)
        self._settled.forget(key)

    async def ensure(self, owner: Owner, kind: Kind, manifest: Manifest) -> None:
        """Make `manifest` so. Raises `Blocked`, `NamespaceLeaving` or `Unavailable`."""
        live = await self._find(owner, kind, manifest)
        if live is None:
            await self._make(owner, kind, manifest)
        elif needs_apply(manifest, live) and not self._settled.knows(owner, kind, manifest, live):
            answer = await self._apply(kind, manifest)
            tell_child("repaired", kind, owner.namespace, manifest["metadata"]["name"])
            self._look_at(owner, kind, manifest, answer)

    async def exists(self, owner: Owner, kind: Kind, manifest: Manifest) -> None:
        """The same for a child that is never applied again once it exists."""
        if await self._find(owner, kind, manifest) is None:
            await self._make(owner, kind, manifest)

    async def _make(self, owner: Owner, kind: Kind, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        again = self._remembered.had(owner, kind, name)
        answer = await self._apply(kind, manifest)
        self._remembered.made(owner, kind, name)
        tell_child("recreated" if again else "created", kind, owner.namespace, name)
        self._look_at(owner, kind, manifest, answer)
        if again:
            await self._announcer.repaired(owner, kind, name)

    def _look_at(self, owner: Owner, kind: Kind, manifest: Manifest, answer: Live) -> None:
        """Remember and log an answer that is not what was applied: the cluster rewrote it."""
        if needs_apply(manifest, answer):
            self._settled.note(owner, kind, manifest, answer)
            tell_child("rewritten by the cluster", kind, owner.namespace, manifest["metadata"]["name"])

    async def _find(self, owner: Owner, kind: Kind, manifest: Manifest) -> Live | None:
        """Our child of that name, or None where the name is free. Raises `Blocked` where something else has it.

        An object in the way is looked up first: a deletion that the watch missed would otherwise block for ever.
        """
        name = manifest["metadata"]["name"]
        known = self._cache.get(kind, owner.namespace, name)
        if known is not None and _in_the_way(owner, kind, known) is None:
            return known
        live = await self._api.get(kind, owner.namespace, name)
        if live is not None and (diagnosis := _in_the_way(owner, kind, live)):
            raise Blocked(diagnosis)
        if live is not None:
            self._cache.put(kind, live)
        return live

    async def patch(self, kind: Kind, manifest: Manifest) -> None:
        """Force the few fields of `manifest` on an object that has other owners, such as a pod."""
        await self._apply(kind, manifest)

    async def annotate(self, kind: Kind, live: Live, annotations: Mapping[str, str]) -> None:
        """Set annotations of a child. Raises `Conflict` where it is not what the cache knows."""
        metadata = live["metadata"]
        await self._keep(kind, metadata["name"], self._api.annotate(kind, live, annotations))
        tell_child("annotated", kind, metadata["namespace"], metadata["name"])

    async def delete(self, owner: Owner, kind: Kind, name: str, uid: str) -> None:
        await self._api.delete(kind, owner.namespace, name, uid)
        self._remembered.deleted(owner, kind, name, uid)
        tell_child("deleted", kind, owner.namespace, name)

    async def _apply(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        return await self._keep(kind, manifest["metadata"]["name"], self._api.apply(kind, manifest))

    async def _keep(self, kind: Kind, name: str, write: Awaitable[Live]) -> Live:
        """The answer to a write, kept in the cache."""
        try:
            answer = await write
        except NotFound as error:
            raise NamespaceLeaving(str(error)) from error
        except Refused as error:
            if "being terminated" in error.message:
                raise NamespaceLeaving(str(error)) from error
            text = f"{kind.kind} {name} is refused by the API server: {error.message}"
            raise Blocked(Diagnosis(Reason.REJECTED, text)) from error
        self._cache.put(kind, answer)
        return answer


def _in_the_way(owner: Owner, kind: Kind, live: Live) -> Diagnosis | None:
    """Why the object of that name cannot be our child; None where it is."""
    what = f"{kind.kind} {live['metadata']['name']}"
    match ownership(owner, live):
        case Ownership.FOREIGN:
            return Diagnosis(Reason.NAME_TAKEN, f"{what} exists and does not belong to this object; it is left alone")
        case Ownership.PREDECESSOR:
            text = f"{what} of an earlier object of the same name is still being removed"
            return Diagnosis(Reason.WAITING_FOR_CLEANUP, text)
    if "deletionTimestamp" in live["metadata"]:
        return Diagnosis(Reason.WAITING_FOR_CLEANUP, f"{what} is being deleted")
    return None

"""observe -> plan -> decide -> apply -> report, for one object. The only place that joins domain and API server.

Nothing is remembered between two calls but when a progress was last written; killing the process at any point loses
nothing. A record of what a revision runs is written before anything is made from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog
from pydantic import ValidationError

from hpu_operator.api.inference import Spec
from hpu_operator.api.reasons import Reason
from hpu_operator.domain import desired, names
from hpu_operator.domain.diagnosis import Diagnosis
from hpu_operator.domain.observed import Observed, Pod
from hpu_operator.domain.owner import Owner, Ownership, ownership
from hpu_operator.domain.quantity import NotAQuantity
from hpu_operator.domain.revision import (
    Record,
    expired,
    next_number,
    read_record,
    record_from_stateful_set,
    record_manifest,
    revision_of,
)
from hpu_operator.domain.rollout import (
    Action,
    CreateGroup,
    DeleteGroup,
    LeaveService,
    ReturnToService,
    awaits_endpoints,
    decide,
)
from hpu_operator.domain.status import Situation, Subject, build_status, invalid_status, leaving_status, timestamp
from hpu_operator.kube.kinds import INFERENCE, POD, RECORD, SERVICE, STATEFUL_SET
from hpu_operator.kube.port import Conflict, Live
from hpu_operator.runtime.announcer import Announcer
from hpu_operator.runtime.cache import Cache
from hpu_operator.runtime.children import Blocked, Children, NamespaceLeaving
from hpu_operator.runtime.key import Key
from hpu_operator.runtime.observer import Observer
from hpu_operator.runtime.status_writer import StatusWriter

_AT_ONCE = 8
_ENDPOINTS_SECONDS = 0.5
_UNSETTLED_SECONDS = 5.0
_BLOCKED_SECONDS = 15.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Plan:
    """What one object asks for, and the record it is made from."""

    owner: Owner
    subject: Subject
    spec: Spec
    revision: str


class Reconciler:
    """`now` gives the time with its zone; it stamps transitions and nothing else is measured with it."""

    def __init__(
        self,
        *,
        cache: Cache,
        children: Children,
        observer: Observer,
        status: StatusWriter,
        announcer: Announcer,
        default_image: str,
        now: Callable[[], datetime],
    ) -> None:
        self._cache = cache
        self._children = children
        self._observer = observer
        self._status = status
        self._announcer = announcer
        self._default_image = default_image
        self._now = now

    async def reconcile(self, key: Key) -> float | None:
        """Bring `key` one step nearer. Returns seconds until it should be looked at again without news; None: never.

        Raises `KubeError` where the API server does not answer.
        """
        parent = self._cache.get(INFERENCE, key.namespace, key.name)
        if parent is None:
            self._forget(key)
            return None
        if "deletionTimestamp" in parent["metadata"]:
            # The garbage collector does the rest; anything made now would be made for nothing.
            return await self._report_leaving(parent)
        try:
            plan = _plan(parent)
        except (ValidationError, NotAQuantity) as error:
            return await self._report_invalid(parent, error)
        try:
            return await self._act(parent, plan)
        except NamespaceLeaving as error:
            _log.info("namespace is being deleted", object=str(key), answer=str(error))
            return None

    def _forget(self, key: Key) -> None:
        self._status.forget(key)
        self._observer.forget(key)
        self._children.forget(key)

    async def _act(self, parent: Live, plan: Plan) -> float | None:
        problem: Diagnosis | None = None
        record: Record | None = None
        self._children.see(plan.owner)
        observed = await self._observer.explain(plan.owner, self._observer.snapshot(plan.owner), self._now())
        try:
            records = await self._repair_records(plan.owner)
            record = await self._record(plan, records)
            await self._services(plan.owner)
            await self._repair_groups(plan.owner, {**records, plan.revision: record})
            actions = decide(plan.spec.replicas, plan.revision, observed, self._now())
            await self._perform(plan.owner, record, actions)
            await self._prune(plan, observed)
        except Blocked as blocked:
            problem = blocked.diagnosis
        observed = Observed(self._observer.snapshot(plan.owner).groups, observed.endpoints)
        return await self._report(parent, plan, record, observed, problem)

    async def _repair_records(self, owner: Owner) -> dict[str, Record]:
        """Every revision's record, made again from a running group where it was deleted."""
        live = self._cache.children(RECORD, Key(owner.namespace, owner.name))
        own = [item for item in live if ownership(owner, item) is Ownership.OURS]
        records = {record.revision: record for item in own if (record := read_record(item))}
        for item in self._observer.stateful_sets(owner):
            group = names.group_of(item["metadata"].get("labels") or {})
            if group is None or group.revision in records:
                continue
            record = record_from_stateful_set(item, next_number(records.values()))
            if record is not None:
                await self._children.exists(owner, RECORD, record_manifest(owner, record))
                records[record.revision] = record
        return records

    async def _record(self, plan: Plan, records: dict[str, Record]) -> Record:
        """What this revision runs: what was written down, or else what is rendered and written down now."""
        if known := records.get(plan.revision):
            return known
        number = next_number(records.values())
        record = desired.render_record(plan.owner, plan.spec, plan.revision, number, self._default_image)
        await self._children.exists(plan.owner, RECORD, record_manifest(plan.owner, record))
        name = names.revision_record(plan.owner.name, plan.revision)
        stored = self._cache.get(RECORD, plan.owner.namespace, name)
        return (read_record(stored) if stored else None) or record

    async def _services(self, owner: Owner) -> None:
        await self._children.ensure(owner, SERVICE, desired.service(owner))
        await self._children.ensure(owner, SERVICE, desired.ranks_service(owner))

    async def _repair_groups(self, owner: Owner, records: dict[str, Record]) -> None:
        for live in self._observer.stateful_sets(owner):
            group = names.group_of(live["metadata"].get("labels") or {})
            record = records.get(group.revision) if group else None
            if group is None or record is None or "deletionTimestamp" in live["metadata"]:
                continue
            await self._children.ensure(owner, STATEFUL_SET, desired.stateful_set(owner, group, record))

    async def _perform(self, owner: Owner, record: Record, actions: Iterable[Action]) -> None:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(action: Action) -> None:
            async with limit:
                await self._perform_one(owner, record, action)

        results = await asyncio.gather(*(one(action) for action in actions), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _perform_one(self, owner: Owner, record: Record, action: Action) -> None:
        _log.info("action", object=f"{owner.namespace}/{owner.name}", action=type(action).__name__, group=action.id)
        match action:
            case CreateGroup(group):
                await self._children.ensure(owner, STATEFUL_SET, desired.stateful_set(owner, group, record))
            case LeaveService(_, pods):
                await self._mark(owner, pods, in_service=False)
            case ReturnToService(_, pods):
                await self._mark(owner, pods, in_service=True)
            case DeleteGroup(_, name, uid):
                await self._children.delete(owner, STATEFUL_SET, name, uid)

    async def _mark(self, owner: Owner, pods: Iterable[Pod], *, in_service: bool) -> None:
        left_at = None if in_service else timestamp(self._now())
        for pod in pods:
            try:
                await self._children.patch(POD, desired.service_label(owner.namespace, pod.name, pod.uid, left_at))
            except (Conflict, NamespaceLeaving):
                # Another pod has the name by now, or none; its event brings the object here again.
                continue

    async def _prune(self, plan: Plan, observed: Observed) -> None:
        live = self._cache.children(RECORD, Key(plan.owner.namespace, plan.owner.name))
        own = {
            record.revision: (record, item)
            for item in live
            if ownership(plan.owner, item) is Ownership.OURS and (record := read_record(item))
        }
        in_use = {plan.revision, *(group.id.revision for group in observed.groups)}
        for record in expired((record for record, _ in own.values()), in_use):
            metadata = own[record.revision][1]["metadata"]
            await self._children.delete(plan.owner, RECORD, metadata["name"], metadata["uid"])

    async def _report(
        self, parent: Live, plan: Plan, record: Record | None, observed: Observed, problem: Diagnosis | None
    ) -> float | None:
        situation = Situation(
            subject=plan.subject,
            spec=plan.spec,
            revision=plan.revision,
            image=record.image if record else None,
            observed=observed,
            problem=problem,
        )
        # The newest status that is known, which is that of our own last write where its event has not come yet.
        newest = self._cache.get(INFERENCE, plan.owner.namespace, plan.owner.name) or parent
        status = build_status(situation, newest.get("status") or {}, self._now())
        held_back = await self._status.write(newest, status)
        await self._announcer.announce(newest, status)
        waits = [held_back, _next_look(status, observed, problem)]
        return min((wait for wait in waits if wait is not None), default=None)

    async def _report_leaving(self, parent: Live) -> float | None:
        """An object that is deleted in the foreground stays until its children are gone, and is not ready meanwhile."""
        observed = self._observer.snapshot(_owner(parent))
        status = leaving_status(_subject(parent), observed, parent.get("status") or {}, self._now())
        return await self._status.write(parent, status)

    async def _report_invalid(self, parent: Live, error: ValidationError | NotAQuantity) -> float | None:
        subject = _subject(parent)
        problem = Diagnosis(Reason.INVALID_SPEC, _explain(error))
        status = invalid_status(subject, problem, parent.get("status") or {}, self._now())
        await self._status.write(parent, status)
        await self._announcer.announce(parent, status)
        return None


def _plan(parent: Live) -> Plan:
    spec = Spec.model_validate(parent.get("spec") or {})
    return Plan(_owner(parent), _subject(parent), spec, revision_of(spec))


def _owner(parent: Live) -> Owner:
    metadata = parent["metadata"]
    return Owner(metadata["namespace"], metadata["name"], metadata["uid"])


def _subject(parent: Live) -> Subject:
    metadata = parent["metadata"]
    return Subject(metadata["namespace"], metadata["name"], int(metadata.get("generation", 1)))


def _explain(error: ValidationError | NotAQuantity) -> str:
    if isinstance(error, NotAQuantity):
        return str(error)
    first = error.errors(include_url=False)[0]
    return f"spec.{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def _next_look(status: Mapping[str, Any], observed: Observed, problem: Diagnosis | None) -> float | None:
    if problem is not None:
        return _UNSETTLED_SECONDS if problem.reason is Reason.WAITING_FOR_CLEANUP else _BLOCKED_SECONDS
    if awaits_endpoints(observed.groups):
        return _ENDPOINTS_SECONDS
    progressing = next(c for c in status["conditions"] if c["type"] == "Progressing")
    at_rest = progressing["reason"] in (Reason.COMPLETE.value, Reason.SCALED_TO_ZERO.value)
    return None if at_rest else _UNSETTLED_SECONDS

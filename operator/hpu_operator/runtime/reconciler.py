"""observe -> act -> report, for one object. The only place that joins domain and API server.

Nothing is remembered between two calls except when progress was last written; killing the process at any point loses
nothing. A record of what a revision runs is written before anything is made from it, a fact before it is acted on.
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
from hpu_operator.domain.diagnosis.questions import Diagnosis
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.observed import Observed, Pod
from hpu_operator.domain.owner import Owner
from hpu_operator.domain.quantity import NotAQuantity
from hpu_operator.domain.revision import revision_of
from hpu_operator.domain.rollout.actions import Action, CreateGroup, DeleteGroup, LeaveService, ReturnToService
from hpu_operator.domain.rollout.decide import Wanted, awaits_endpoints, decide, learn
from hpu_operator.domain.status.conditions import Situation, Subject
from hpu_operator.domain.status.document import build_status, invalid_status, leaving_status
from hpu_operator.domain.timestamps import timestamp
from hpu_operator.kube.kinds import INFERENCE, POD, SERVICE, STATEFUL_SET
from hpu_operator.kube.port import Conflict, Live
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.inputs.observer import Observer
from hpu_operator.runtime.key import Key
from hpu_operator.runtime.outputs.announcer import Announcer
from hpu_operator.runtime.outputs.children import Blocked, Children, NamespaceLeaving
from hpu_operator.runtime.outputs.records import Records
from hpu_operator.runtime.outputs.status_writer import StatusWriter

_AT_ONCE = 8
_ENDPOINTS_SECONDS = 0.5
_UNSETTLED_SECONDS = 5.0
_BLOCKED_SECONDS = 15.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Intent:
    """What one object asks for. `revision` is that of its spec."""

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
        self._records = Records(cache, children)
        self._observer = observer
        self._status = status
        self._announcer = announcer
        self._default_image = default_image
        self._now = now

    async def reconcile(self, key: Key) -> float | None:
        """Bring `key` one step nearer. Returns after how many seconds to look again without news; None: not at all.

        Raises `KubeError` where the API server does not answer.
        """
        parent = self._cache.get(INFERENCE, key.namespace, key.name)
        if parent is None:
            self._forget(key)
            return None
        if "deletionTimestamp" in parent["metadata"]:
            # The garbage collector does the rest.
            return await self._report_leaving(parent)
        try:
            intent = _intent(parent)
        except (ValidationError, NotAQuantity) as error:
            return await self._report_invalid(parent, error)
        try:
            observed = await self._observe(intent.owner)
            problem = await self._act(intent, observed)
            return await self._report(parent, intent, observed.endpoints, problem)
        except NamespaceLeaving as error:
            _log.info("namespace is being deleted", object=str(key), answer=str(error))
            return None

    def _forget(self, key: Key) -> None:
        self._status.forget(key)
        self._observer.forget(key)
        self._children.forget(key)

    async def _observe(self, owner: Owner) -> Observed:
        self._children.see(owner)
        return await self._observer.explain(owner, self._observer.snapshot(owner), self._now())

    async def _act(self, intent: Intent, observed: Observed) -> Diagnosis | None:
        """Write what is missing. Returns what keeps children from being written."""
        owner, spec, revision = intent.owner, intent.spec, intent.revision
        try:
            await self._records.repair(owner, self._cache.own(STATEFUL_SET, owner))
            await self._records.ensure(
                owner,
                revision,
                lambda number: desired.render_record(owner, spec, revision, number, self._default_image),
            )
            await self._services(owner)
            await self._repair_groups(owner)
            for learned, facts in learn(self._wanted(intent), observed, self._now()).items():
                await self._records.note(owner, learned, facts)
            wanted = self._wanted(intent)
            await self._perform(owner, decide(wanted, observed, self._now()))
            running = (group.id.revision for group in observed.groups)
            await self._records.prune(owner, {revision, wanted.target, *running})
        except Blocked as blocked:
            return blocked.diagnosis
        return None

    def _wanted(self, intent: Intent) -> Wanted:
        """What should run, with what is known now: the one place where the target revision is chosen."""
        facts = {revision: record.facts for revision, record in self._records.known(intent.owner).items()}
        return Wanted(intent.spec.replicas, intent.revision, facts)

    async def _services(self, owner: Owner) -> None:
        await self._children.ensure(owner, SERVICE, desired.service(owner))
        await self._children.ensure(owner, SERVICE, desired.ranks_service(owner))

    async def _repair_groups(self, owner: Owner) -> None:
        records = self._records.known(owner)
        for live in self._cache.own(STATEFUL_SET, owner):
            group = names.group_of(live["metadata"].get("labels") or {})
            record = records.get(group.revision) if group else None
            if group is None or record is None or "deletionTimestamp" in live["metadata"]:
                continue
            await self._children.ensure(owner, STATEFUL_SET, desired.stateful_set(owner, group, record))

    async def _perform(self, owner: Owner, actions: Iterable[Action]) -> None:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(action: Action) -> None:
            async with limit:
                await self._perform_one(owner, action)

        results = await asyncio.gather(*(one(action) for action in actions), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _perform_one(self, owner: Owner, action: Action) -> None:
        _log.info("action", object=str(Key.of(owner)), action=type(action).__name__, group=action.id)
        match action:
            case CreateGroup(group):
                await self._create(owner, group)
            case LeaveService(_, pods):
                await self._mark(owner, pods, in_service=False)
            case ReturnToService(_, pods):
                await self._mark(owner, pods, in_service=True)
            case DeleteGroup(_, name, uid):
                await self._children.delete(owner, STATEFUL_SET, name, uid)

    async def _create(self, owner: Owner, group: GroupId) -> None:
        """Make a group from the record of its own revision and nothing else."""
        record = self._records.known(owner).get(group.revision)
        if record is None:
            _log.error("group not created: its revision has no record", object=str(Key.of(owner)), group=group)
            return
        await self._children.ensure(owner, STATEFUL_SET, desired.stateful_set(owner, group, record))

    async def _mark(self, owner: Owner, pods: Iterable[Pod], *, in_service: bool) -> None:
        left_at = None if in_service else timestamp(self._now())
        for pod in pods:
            try:
                await self._children.patch(POD, desired.service_label(owner.namespace, pod.name, pod.uid, left_at))
            except (Conflict, NamespaceLeaving):
                # The pod is gone or replaced by now; its event queues the object again.
                continue

    async def _report(
        self, parent: Live, intent: Intent, endpoints: frozenset[str], problem: Diagnosis | None
    ) -> float | None:
        owner = intent.owner
        observed = Observed(self._observer.snapshot(owner).groups, endpoints)
        record = self._records.known(owner).get(intent.revision)
        situation = Situation(
            subject=intent.subject,
            spec=intent.spec,
            revision=intent.revision,
            target=self._wanted(intent).target,
            image=record.image if record else None,
            observed=observed,
            problem=problem,
        )
        # The newest known status: that of our own last write where its event has not arrived yet.
        newest = self._cache.get(INFERENCE, owner.namespace, owner.name) or parent
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


def _intent(parent: Live) -> Intent:
    spec = Spec.model_validate(parent.get("spec") or {})
    return Intent(_owner(parent), _subject(parent), spec, revision_of(spec))


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

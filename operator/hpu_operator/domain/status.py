"""What the object's status says, from what was observed and nothing else.

`Ready` is about the generation in `observedGeneration`, never about pods of an older revision; `Available` says whether
anybody answers at all. Conditions are sorted, times have second precision, and a time changes only with its status, so
that an unchanged truth is an unchanged object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hpu_engine.contract import API_PORT
from hpu_operator.api.inference import Spec
from hpu_operator.api.reasons import Reason, is_failure, severity
from hpu_operator.domain import names
from hpu_operator.domain.diagnosis import Diagnosis, diagnose_group, leaving_text
from hpu_operator.domain.engine_arguments import served_name
from hpu_operator.domain.observed import Group, Observed
from hpu_operator.domain.progress import group_warm_up, is_warm
from hpu_operator.domain.rollout.slots import Slot, slots
from hpu_operator.domain.timestamps import timestamp

Problem = Diagnosis
"""Why children cannot be made: an invalid spec, a name that is taken, a refusal of the API server."""

_NAMED = 4
"""Groups that a message names beside the one it is about."""

_WARM = Diagnosis(Reason.WARMED_UP, "every group has run all of its shapes")


@dataclass(frozen=True)
class Subject:
    """Which object, at which generation."""

    namespace: str
    name: str
    generation: int


def invalid_status(subject: Subject, problem: Problem, previous: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Status of an object whose spec cannot be read. What was true of its pods is kept; the conditions are not."""
    conditions = [_condition(subject, kind, "False", problem) for kind in ("Accepted", "Ready")]
    kept = {key: value for key, value in previous.items() if key not in ("conditions", "observedGeneration")}
    return kept | {"observedGeneration": subject.generation, "conditions": _timed(conditions, previous, now)}


def leaving_status(subject: Subject, observed: Observed, previous: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Status of an object that is being deleted and is still there because its children go first."""
    pods = [pod for group in observed.groups for pod in group.pods]
    why = Diagnosis(Reason.DRAINING, f"the object is being deleted: {leaving_text(pods, 'its pods')}")
    verdicts = {"Available": "False", "Progressing": "True", "Ready": "False"}
    conditions = [_condition(subject, kind, verdict, why) for kind, verdict in verdicts.items()]
    of_pods = ("readyReplicas", "updatedReplicas", "updatedReadyReplicas")
    kept = {key: value for key, value in previous.items() if key not in ("conditions", "warmUp")}
    return kept | {
        "observedGeneration": subject.generation,
        "conditions": _timed(conditions, previous, now),
        "replicas": len({group.id.index for group in observed.groups if group.pods}),
        **dict.fromkeys(of_pods, 0),
    }


@dataclass(frozen=True)
class Situation:
    """Everything a status is made from. `revision` is the spec's, `target` the one that groups are made of, `problem`
    what kept children from being written in this round."""

    subject: Subject
    spec: Spec
    revision: str
    target: str
    image: str | None
    observed: Observed
    problem: Problem | None = None


def build_status(seen: Situation, previous: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """The whole status."""
    subject, spec, groups = seen.subject, seen.spec, seen.observed.groups
    updated = [slot.successor for slot in slots(spec.replicas, seen.revision, groups) if slot.successor]
    status: dict[str, Any] = {
        "observedGeneration": subject.generation,
        "conditions": _timed(_conditions(seen, now), previous, now),
        "replicas": len({group.id.index for group in groups if not group.leaving}),
        "readyReplicas": len({group.id.index for group in groups if group.answers}),
        "updatedReplicas": len(updated),
        "updatedReadyReplicas": sum(group.answers for group in updated),
        "revision": seen.revision,
        "servedName": served_name(subject.name, spec),
        "url": f"http://{names.service(subject.name)}.{subject.namespace}.svc:{API_PORT}",
        "selector": f"{names.NAME_LABEL}={subject.name},{names.POD_INDEX_LABEL}=0",
    }
    if seen.image:
        status["image"] = seen.image
    if warm_up := _warm_up_text(updated) or _kept_warm_up(seen, updated, previous):
        status["warmUp"] = warm_up
    return status


Verdict = tuple[str, Diagnosis]
"""Status of a condition, and why."""


def _conditions(seen: Situation, now: datetime) -> list[dict[str, Any]]:
    held = slots(seen.spec.replicas, seen.target, seen.observed.groups)
    accepted = Diagnosis(Reason.ACCEPTED, "the spec is valid and the children are the operator's own")
    verdicts = {"Accepted": ("False", seen.problem) if seen.problem else ("True", accepted)}
    blocked = seen.problem or _apart(seen, _worst(held, now))
    if blocked is not None:
        verdicts |= _while_blocked(seen, held, blocked)
    else:
        verdicts |= _at_rest(seen)
    return [_condition(seen.subject, kind, *verdict) for kind, verdict in verdicts.items()]


def _at_rest(seen: Situation) -> dict[str, Verdict]:
    """Every group the spec asks for answers."""
    wanted = seen.spec.replicas
    leaving = {group.id.index for group in seen.observed.groups if group.id.index >= wanted}
    at_rest: Verdict = ("False", Diagnosis(Reason.SCALED_TO_ZERO, "spec.replicas is 0"))
    verdicts = dict.fromkeys(("Available", "Progressing", "Ready", "WarmedUp"), at_rest)
    if wanted:
        text = f"{wanted} of {wanted} groups answer"
        verdicts = {
            "Available": ("True", Diagnosis(Reason.ANSWERING, text)),
            "Progressing": ("False", Diagnosis(Reason.COMPLETE, text)),
            "Ready": ("True", Diagnosis(Reason.ANSWERING, text)),
            "WarmedUp": ("True", _WARM),
        }
    if leaving:
        text = f"{len(leaving)} groups beyond spec.replicas are leaving"
        verdicts["Progressing"] = ("True", Diagnosis(Reason.DRAINING, text))
    return verdicts


def _while_blocked(seen: Situation, held: Sequence[Slot], blocked: Diagnosis) -> dict[str, Verdict]:
    """Something is missing; what is there is still told."""
    verdicts: dict[str, Verdict] = dict.fromkeys(("Available", "Ready", "WarmedUp"), ("False", blocked))
    verdicts["Progressing"] = ("False" if is_failure(blocked.reason) else "True", blocked)
    if answering := len({group.id.index for group in seen.observed.groups if group.answers}):
        text = f"{answering} of {seen.spec.replicas} groups answer"
        verdicts["Available"] = ("True", Diagnosis(Reason.ANSWERING, text))
    if seen.target == seen.revision and held and all(slot.successor and is_warm(slot.successor) for slot in held):
        verdicts["WarmedUp"] = ("True", _WARM)
    return verdicts


def _apart(seen: Situation, worst: Diagnosis | None) -> Diagnosis | None:
    """`worst`, and where the groups go if not to the spec's revision, which then cannot be ready."""
    if seen.target == seen.revision:
        return worst
    text = f"groups go to revision {seen.target}, not to {seen.revision} of the spec"
    return Diagnosis(worst.reason, f"{worst.message}; {text}") if worst else Diagnosis(Reason.ROLLING_OUT, text)


def _worst(held: Sequence[Slot], now: datetime) -> Diagnosis | None:
    """The gravest reason why a group of this revision does not answer, and in short those of the others."""
    found = [(slot, diagnosis) for slot in held if (diagnosis := _diagnose_slot(slot, now))]
    if not found:
        return None
    told, worst = min(found, key=lambda item: severity(item[1].reason))
    others = [(slot.index, _short(slot, why, now)) for slot, why in found if slot is not told]
    return Diagnosis(worst.reason, worst.message.rstrip(".") + _in_short(others) if others else worst.message)


def _short(slot: Slot, why: Diagnosis, now: datetime) -> Reason:
    """One word for a slot. The failure of an old group that waits to be replaced is more than that it waits."""
    old = diagnose_group(slot.to_replace, now) if slot.to_replace else None
    return old.reason if old and is_failure(old.reason) else why.reason


def _in_short(others: Sequence[tuple[int, Reason]]) -> str:
    gravest = sorted(others, key=lambda item: (severity(item[1]), item[0]))
    named = [f"; group {index}: {reason.value}" for index, reason in gravest[:_NAMED]]
    more = len(others) - len(named)
    return "".join(named) + (f"; and {more} more groups" if more else "")


def _diagnose_slot(slot: Slot, now: datetime) -> Diagnosis | None:
    if slot.successor:
        return diagnose_group(slot.successor, now)
    if slot.to_replace:
        text = f"group {slot.index} is still of revision {slot.to_replace.id.revision}"
        old = diagnose_group(slot.to_replace, now)
        return Diagnosis(Reason.ROLLING_OUT, text + (f"; {old.message}" if old else ""))
    if slot.groups:
        pods = [pod for group in slot.groups for pod in group.pods]
        return Diagnosis(Reason.DRAINING, f"group {slot.index}: {leaving_text(pods)}")
    return Diagnosis(Reason.ROLLING_OUT, f"group {slot.index} is being created")


def _kept_warm_up(seen: Situation, current: Sequence[Group], previous: Mapping[str, Any]) -> str | None:
    """What was said before, where a group that answers requests has not been asked yet: an operator just started."""
    unasked = any(group.answers and group_warm_up(group) is None for group in current)
    said: str | None = previous.get("warmUp")
    return said if unasked and previous.get("revision") == seen.revision else None


def _warm_up_text(current: Sequence[Group]) -> str | None:
    """Of the group that is furthest behind."""
    counts = [count for group in current if (count := group_warm_up(group)) and count[1]]
    if not counts:
        return None
    done, total = min(counts, key=lambda count: count[0] / count[1])
    return f"{done}/{total}"


def _condition(subject: Subject, kind: str, status: str, why: Diagnosis) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "observedGeneration": subject.generation,
        "reason": why.reason.value,
        "message": why.message[:2048],
    }


def _timed(conditions: list[dict[str, Any]], previous: Mapping[str, Any], now: datetime) -> list[dict[str, Any]]:
    """With the time of the last change of status: kept where the status is what it was."""
    before = {condition.get("type"): condition for condition in previous.get("conditions") or ()}
    stamp = timestamp(now)
    for condition in conditions:
        old = before.get(condition["type"], {})
        same = old.get("status") == condition["status"]
        condition["lastTransitionTime"] = old.get("lastTransitionTime", stamp) if same else stamp
    return sorted(conditions, key=lambda condition: str(condition["type"]))


def only_progress(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two different statuses differ in nothing but how far something is; that it is done is more than that."""
    return _without_progress(old) == _without_progress(new)


def _without_progress(status: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in status.items() if key != "warmUp"}
    done, _, total = status.get("warmUp", "").partition("/")
    kept["warmedUp"] = bool(total) and done == total
    kept["conditions"] = [
        {key: value for key, value in condition.items() if key != "message"}
        for condition in status.get("conditions") or ()
    ]
    return kept

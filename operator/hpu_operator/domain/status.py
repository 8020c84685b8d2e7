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
from hpu_operator.domain.diagnosis import Diagnosis, diagnose_group
from hpu_operator.domain.engine_arguments import served_name
from hpu_operator.domain.observed import Group, Observed
from hpu_operator.domain.progress import group_warm_up, is_warm
from hpu_operator.domain.rollout import Slot, slots

Problem = Diagnosis
"""Why children cannot be made: an invalid spec, a name that is taken, a refusal of the API server."""

_PROGRESS_FIELDS = ("warmUp",)


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


def build_status(
    subject: Subject,
    spec: Spec,
    revision: str,
    image: str | None,
    observed: Observed,
    problem: Problem | None,
    previous: Mapping[str, Any],
    now: datetime,
) -> dict[str, Any]:
    """The whole status. `problem` is what kept children from being made in this round."""
    held = slots(spec.replicas, revision, observed.groups)
    ready = [group for group in observed.groups if group.ready]
    current = [slot.current for slot in held if slot.current]
    status: dict[str, Any] = {
        "observedGeneration": subject.generation,
        "conditions": _timed(_conditions(subject, spec, held, observed, problem, now), previous, now),
        "replicas": len({group.id.index for group in observed.groups if not group.leaving}),
        "readyReplicas": len({group.id.index for group in ready}),
        "updatedReplicas": len(current),
        "updatedReadyReplicas": sum(group.ready for group in current),
        "revision": revision,
        "servedName": served_name(subject.name, spec),
        "url": f"http://{names.service(subject.name)}.{subject.namespace}.svc:{API_PORT}",
        "selector": f"{names.NAME_LABEL}={subject.name},{names.POD_INDEX_LABEL}=0",
    }
    if image:
        status["image"] = image
    if warm_up := _warm_up_text(current):
        status["warmUp"] = warm_up
    return status


def _conditions(
    subject: Subject,
    spec: Spec,
    held: Sequence[Slot],
    observed: Observed,
    problem: Problem | None,
    now: datetime,
) -> list[dict[str, Any]]:
    blocked = problem or _worst(held, now)
    answering = sum(group.ready for group in observed.groups)
    leaving = [group for group in observed.groups if group.id.index >= spec.replicas]
    say = dict.fromkeys(("Accepted", "Available", "Progressing", "Ready", "WarmedUp"), "False")
    why: dict[str, Diagnosis] = {}

    why["Accepted"] = problem or Diagnosis(Reason.ACCEPTED, "the spec is valid and the children are the operator's own")
    say["Accepted"] = "False" if problem else "True"

    if spec.replicas == 0 and blocked is None:
        at_rest = Diagnosis(Reason.SCALED_TO_ZERO, "spec.replicas is 0")
        why |= dict.fromkeys(("Available", "Progressing", "Ready", "WarmedUp"), at_rest)
    elif blocked is None:
        all_of_them = f"{spec.replicas} of {spec.replicas} groups answer"
        say |= {"Available": "True", "Ready": "True", "WarmedUp": "True"}
        why["Available"] = why["Ready"] = Diagnosis(Reason.ANSWERING, all_of_them)
        why["WarmedUp"] = Diagnosis(Reason.WARMED_UP, "every group has run all of its shapes")
        why["Progressing"] = Diagnosis(Reason.COMPLETE, f"{all_of_them} at this revision")
    else:
        why |= dict.fromkeys(("Available", "Progressing", "Ready", "WarmedUp"), blocked)
        say["Progressing"] = "False" if is_failure(blocked.reason) else "True"
        if answering:
            say["Available"] = "True"
            why["Available"] = Diagnosis(Reason.ANSWERING, f"{answering} of {spec.replicas} groups answer")
        if held and all(slot.current is not None and is_warm(slot.current) for slot in held):
            say["WarmedUp"] = "True"
            why["WarmedUp"] = Diagnosis(Reason.WARMED_UP, "every group has run all of its shapes")
    if blocked is None and leaving:
        say["Progressing"] = "True"
        why["Progressing"] = Diagnosis(Reason.DRAINING, f"{len(leaving)} groups beyond spec.replicas are leaving")
    return [_condition(subject, kind, say[kind], why[kind]) for kind in sorted(say)]


def _worst(held: Sequence[Slot], now: datetime) -> Diagnosis | None:
    """The gravest reason why a group of this revision does not answer, and how many groups have one."""
    found = [diagnosis for slot in held if (diagnosis := _diagnose_slot(slot, now))]
    if not found:
        return None
    worst = min(found, key=lambda diagnosis: severity(diagnosis.reason))
    more = len(found) - 1
    tail = f" (and {more} more of {len(held)} groups)" if more else ""
    return Diagnosis(worst.reason, worst.message + tail)


def _diagnose_slot(slot: Slot, now: datetime) -> Diagnosis | None:
    if slot.current is not None:
        return diagnose_group(slot.current, now)
    if slot.replaceable is not None:
        text = f"group {slot.index} is still of revision {slot.replaceable.id.revision}"
        old = diagnose_group(slot.replaceable, now)
        return Diagnosis(Reason.ROLLING_OUT, text + (f"; {old.message}" if old else ""))
    if slot.others:
        return Diagnosis(Reason.DRAINING, f"group {slot.index}: running requests of its old pods are finishing")
    return Diagnosis(Reason.ROLLING_OUT, f"group {slot.index} is being created")


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


def timestamp(now: datetime) -> str:
    """Second precision, as metav1.Time: the API server keeps the strings of a custom resource as they are sent."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def only_progress(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two different statuses differ in nothing but how far something is."""
    return _without_progress(old) == _without_progress(new)


def _without_progress(status: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in status.items() if key not in _PROGRESS_FIELDS}
    kept["conditions"] = [
        {key: value for key, value in condition.items() if key != "message"}
        for condition in status.get("conditions") or ()
    ]
    return kept

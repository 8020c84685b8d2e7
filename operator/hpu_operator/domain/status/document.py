"""The status of an object. Times have second precision, so that an unchanged truth is an unchanged object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from hpu_engine.contract import API_PORT
from hpu_operator.api.reasons import Reason
from hpu_operator.domain import names
from hpu_operator.domain.diagnosis.progress import group_warm_up
from hpu_operator.domain.diagnosis.questions import Diagnosis, leaving_text
from hpu_operator.domain.engine_arguments import served_name
from hpu_operator.domain.observed import Group, Observed
from hpu_operator.domain.rollout.slots import slots
from hpu_operator.domain.status.conditions import Situation, Subject, Verdict, conditions, verdicts


def invalid_status(subject: Subject, problem: Diagnosis, previous: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Status of an object whose spec cannot be read. What was true of its pods is kept; the conditions are not."""
    refused: Verdict = ("False", problem)
    return dict(previous) | {
        "observedGeneration": subject.generation,
        "conditions": conditions(subject, {"Accepted": refused, "Ready": refused}, previous, now),
    }


def leaving_status(subject: Subject, observed: Observed, previous: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Status of an object that is being deleted and is still there because its children go first."""
    pods = [pod for group in observed.groups for pod in group.pods]
    why = Diagnosis(Reason.DRAINING, f"the object is being deleted: {leaving_text(pods, 'its pods')}")
    said: dict[str, Verdict] = {"Available": ("False", why), "Progressing": ("True", why), "Ready": ("False", why)}
    of_pods = ("readyReplicas", "updatedReplicas", "updatedReadyReplicas")
    return {key: value for key, value in previous.items() if key != "warmUp"} | {
        "observedGeneration": subject.generation,
        "conditions": conditions(subject, said, previous, now),
        "replicas": len({group.id.index for group in observed.groups if group.pods}),
        **dict.fromkeys(of_pods, 0),
    }


def build_status(seen: Situation, previous: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """The whole status."""
    subject, spec, groups = seen.subject, seen.spec, seen.observed.groups
    updated = [slot.successor for slot in slots(spec.replicas, seen.revision, groups) if slot.successor]
    status: dict[str, Any] = {
        "observedGeneration": subject.generation,
        "conditions": conditions(subject, verdicts(seen, now), previous, now),
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

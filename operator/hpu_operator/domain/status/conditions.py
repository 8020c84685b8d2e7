"""The conditions of an object, from what was observed and nothing else.

`Ready` is about the generation in `observedGeneration`, never about pods of an older revision; `Available` says whether
any group answers at all. A time changes only with its status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hpu_operator.api.inference import Spec
from hpu_operator.api.reasons import Reason, is_failure, severity
from hpu_operator.domain.diagnosis.progress import is_warm
from hpu_operator.domain.diagnosis.questions import Diagnosis, diagnose_group, leaving_text
from hpu_operator.domain.observed import Observed
from hpu_operator.domain.rollout.slots import Slot, slots
from hpu_operator.domain.timestamps import timestamp

_NAMED = 4
"""Groups that a message names beside the one it is about."""

_WARM = Diagnosis(Reason.WARMED_UP, "every group has run all of its shapes")


@dataclass(frozen=True)
class Subject:
    """Which object, at which generation."""

    namespace: str
    name: str
    generation: int


@dataclass(frozen=True)
class Situation:
    """Everything a status is made from. `revision` is the spec's, `target` the one that groups are made of, `problem`
    why children could not be written: a name that is taken, a refusal of the API server."""

    subject: Subject
    spec: Spec
    revision: str
    target: str
    image: str | None
    observed: Observed
    problem: Diagnosis | None = None


Verdict = tuple[str, Diagnosis]
"""Status of a condition, and why."""


def verdicts(seen: Situation, now: datetime) -> dict[str, Verdict]:
    """Each condition of an object whose spec is valid."""
    held = slots(seen.spec.replicas, seen.target, seen.observed.groups)
    accepted = Diagnosis(Reason.ACCEPTED, "the spec is valid and the children are the operator's own")
    blocked = seen.problem or _apart(seen, _worst(held, now))
    return {
        "Accepted": ("False", seen.problem) if seen.problem else ("True", accepted),
        **(_while_blocked(seen, held, blocked) if blocked else _at_rest(seen, held)),
    }


def _at_rest(seen: Situation, held: Sequence[Slot]) -> dict[str, Verdict]:
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
    replaced = sum(len(slot.groups) - 1 for slot in held)
    if leaving or replaced:
        text = f"{len(leaving)} groups beyond spec.replicas" if leaving else f"{replaced} replaced groups"
        verdicts["Progressing"] = ("True", Diagnosis(Reason.DRAINING, f"{text} are leaving"))
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


def conditions(
    subject: Subject, verdicts: Mapping[str, Verdict], previous: Mapping[str, Any], now: datetime
) -> list[dict[str, Any]]:
    """The conditions by type. The time of one whose status is what it was in the `previous` status is kept."""
    before = {condition.get("type"): condition for condition in previous.get("conditions") or ()}
    stamp = timestamp(now)
    found = []
    for kind, (status, why) in sorted(verdicts.items()):
        old = before.get(kind, {})
        since = old.get("lastTransitionTime", stamp) if old.get("status") == status else stamp
        found.append(
            {
                "type": kind,
                "status": status,
                "observedGeneration": subject.generation,
                "reason": why.reason.value,
                "message": why.message[:2048],
                "lastTransitionTime": since,
            }
        )
    return found

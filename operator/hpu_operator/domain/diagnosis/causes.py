"""What the kubelet's and the scheduler's own words mean, as a reason and a sentence.

The words are those of Kubernetes 1.37, recorded from a real kubelet; where one reason of theirs covers several causes,
the message is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from hpu_engine.contract import FailureReason, TerminationMessage
from hpu_operator.api.reasons import Reason
from hpu_operator.domain import spec_fields
from hpu_operator.domain.observed import Event


@dataclass(frozen=True)
class Cause:
    reason: Reason
    text: str


_IMAGE = {
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
}  # fmt: skip
_START = {"RunContainerError", "CreateContainerError"}
_MOUNT = {"FailedMount", "FailedAttachVolume", "FailedMapVolume"}
_BEFORE_THE_SANDBOX = _MOUNT | {"FailedCreatePodSandBox"}
_GOOD_NEWS = {"Pulled", "Created", "Started"}
_LATE_CACHES = ("failed to sync configmap cache", "failed to sync secret cache")
_LATE_KNOWLEDGE = ("no relationship found between node", 'forbidden: User "system:node:', *_LATE_CACHES)
"""A node that asks for what a new pod refers to before the API server's authorizer has seen the pod."""

PERSISTED = timedelta(seconds=30)
"""From the first to the last time of an event that usually heals by itself, until it is believed."""

ENGINE_REASONS = {
    FailureReason.USAGE: Reason.BAD_ARGUMENTS,
    FailureReason.PORT_TAKEN: Reason.BAD_ARGUMENTS,
    FailureReason.MODEL_NOT_FOUND: Reason.MODEL_NOT_FOUND,
    FailureReason.MODEL_BROKEN: Reason.MODEL_BROKEN,
    FailureReason.MODEL_UNSUPPORTED: Reason.MODEL_UNSUPPORTED,
    FailureReason.INSUFFICIENT_MEMORY: Reason.INSUFFICIENT_MEMORY,
    FailureReason.WORKER_LOST: Reason.WORKER_LOST,
    FailureReason.WORKER_FROZEN: Reason.WORKER_LOST,
    FailureReason.PEER_LOST: Reason.WORKER_LOST,
    FailureReason.MISMATCH: Reason.CRASH_LOOP,
    FailureReason.INTERNAL: Reason.CRASH_LOOP,
}


def of_scheduling(message: str) -> Cause:
    """Cause of PodScheduled=False/Unschedulable: one reason of the scheduler's for four causes."""
    text = message.partition(" preemption:")[0].strip()
    claim = re.search(r'persistentvolumeclaim "([^"]+)"', message)
    if claim:
        state = "is being deleted" if "being deleted" in message else "does not exist"
        return Cause(Reason.VOLUME_MISSING, f"PersistentVolumeClaim {claim[1]} {state}")
    if "unbound immediate PersistentVolumeClaims" in message or "didn't find available persistent volumes" in message:
        return Cause(Reason.VOLUME_MISSING, "a PersistentVolumeClaim is not bound to a volume")
    if "Insufficient" in message or "Too many pods" in message or "no nodes available" in message:
        return Cause(Reason.NO_CAPACITY, text)
    return Cause(Reason.NO_MATCHING_NODE, text)


def of_waiting(waiting: Mapping[str, str]) -> Cause | None:
    """Cause of a waiting container; None where its reason alone does not say (being created, backing off)."""
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _IMAGE:
        return Cause(Reason.IMAGE_PULL_FAILED, message or reason)
    if reason == "CreateContainerConfigError":
        return Cause(_missing_reference(message) or Reason.POD_REFUSED, message or reason)
    if reason in _START:
        return Cause(Reason.START_FAILED, message or reason)
    return None


def pull_secrets_missing(events: Iterable[Event]) -> str | None:
    """What the kubelet says of imagePullSecrets that do not exist: it goes on without them, and the pull may fail."""
    found = next((event for event in events if event.reason == "FailedToRetrieveImagePullSecret"), None)
    return found.message if found else None


def _missing_reference(message: str) -> Reason | None:
    lower = message.lower()
    if not any(words in lower for words in ("not found", "couldn't find key", "non-existent")):
        return None
    if "secret" in lower:
        return Reason.SECRET_MISSING
    return Reason.CONFIG_MAP_MISSING if "configmap" in lower or "config key" in lower else None


def of_events(events: Iterable[Event], sandbox_since: datetime | None = None) -> Cause | None:
    """Cause of a container that stays in creation. Newest event last.

    `sandbox_since` is when the pod's sandbox stood, which it does only once its volumes are mounted.
    """
    for event in reversed(tuple(events)):
        if event.reason in _GOOD_NEWS:
            return None
        if event.reason in _BEFORE_THE_SANDBOX and (_overtaken(event, sandbox_since) or _heals_itself(event)):
            continue
        if event.reason in _MOUNT:
            return Cause(_missing_reference(event.message) or Reason.VOLUME_NOT_MOUNTED, event.message)
        if event.reason == "FailedCreatePodSandBox":
            return Cause(Reason.START_FAILED, event.message)
        if event.reason == "Pulling":
            return Cause(Reason.PULLING_IMAGE, event.message)
    return None


def _overtaken(event: Event, good_news: datetime | None) -> bool:
    return good_news is not None and event.last is not None and event.last <= good_news


def _heals_itself(event: Event) -> bool:
    """Whether the event only says that the node learned of its pod late, and has not lasted long enough for more."""
    if not any(words in event.message for words in _LATE_KNOWLEDGE):
        return False
    return event.first is None or event.last is None or event.last - event.first < PERSISTED


def of_end(ended: Mapping[str, object], events: Iterable[Event], template: Mapping[str, Any]) -> Cause:
    """Cause of a container's end: the engine's own words first, then the kubelet's."""
    if ended.get("reason") == "OOMKilled":
        limit = spec_fields.memory_limit(template)
        why = "because its node ran out of memory" if limit == spec_fields.NOT_SET else "at its memory limit"
        return Cause(Reason.OUT_OF_MEMORY, f"killed {why} ({limit}; exit code 137)")
    if said := TerminationMessage.parse(str(ended.get("message") or "")):
        return of_engine(said, template)
    code = ended.get("exitCode")
    if ended.get("reason") in ("StartError", "ContainerCannotRun"):
        return Cause(Reason.START_FAILED, str(ended.get("message") or "the process cannot be started"))
    if code == 137 and (killed := _liveness_text(events)):
        return Cause(Reason.LIVENESS_FAILED, killed)
    line = first_line(ended)
    return Cause(Reason.CRASH_LOOP, f"the engine ended with exit code {code}" + (f": {line}" if line else ""))


def of_engine(said: TerminationMessage, template: Mapping[str, Any]) -> Cause:
    """The engine's own words, behind the field of the spec they are about."""
    field, sentence = spec_fields.field_of(said, template), _engine_sentence(said)
    return Cause(ENGINE_REASONS[said.reason], f"{field}: {sentence}" if field else sentence)


def _liveness_text(events: Iterable[Event]) -> str | None:
    for event in reversed(tuple(events)):
        if event.reason == "Unhealthy" and event.message.startswith(("Liveness", "Startup")):
            return f"restarted by the kubelet: {event.message}"
    return None


def _engine_sentence(said: TerminationMessage) -> str:
    """The message, and the evidence that it does not name itself."""
    facts = {
        "path": said.path, "tensor": said.tensor, "rank": said.rank, "worker": said.worker, "bucket": said.bucket,
        "exit code": said.exit_code, "signal": said.signal,
    }  # fmt: skip
    extra = [f"{name} {value}" for name, value in facts.items() if value is not None and str(value) not in said.message]
    return said.message + (f" ({', '.join(extra)})" if extra else "")


def first_line(ended: Mapping[str, object]) -> str:
    lines = [line.strip() for line in str(ended.get("message") or "").splitlines() if line.strip()]
    return lines[0] if lines else ""

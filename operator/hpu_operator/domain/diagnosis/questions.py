"""Why a pod is not answering: one reason and one sentence, from what the kubelet, the engine and events say.

The questions come in the order in which a pod starts. A container that ended is judged by its last end, because a
snapshot of a crashing container may show waiting, terminated or running.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from hpu_operator.api.reasons import Reason, severity
from hpu_operator.domain.diagnosis import causes, progress
from hpu_operator.domain.engine_arguments import drain_seconds_of
from hpu_operator.domain.observed import Group, Pod
from hpu_operator.domain.timestamps import parse_time

EVENTS_AFTER = timedelta(seconds=10)
"""A pod that has waited this long is explained by its events, which alone tell of a missing volume or a slow pull."""

CRASH_MEMORY = timedelta(minutes=10)
"""For how long the last end of a container explains why it is not ready."""

CALM = timedelta(seconds=60)
"""A container that ended at least twice must have run this long before its group counts as ready again."""


@dataclass(frozen=True)
class Diagnosis:
    reason: Reason
    message: str

    @property
    def severity(self) -> int:
        """Lower is worse."""
        return severity(self.reason)


def diagnose_group(group: Group, now: datetime) -> Diagnosis | None:
    """Why `group` is not ready; None where it is."""
    if group.leaving:
        return Diagnosis(Reason.DRAINING, f"group {group.id.index}: {leaving_text(group.pods)}")
    found = [diagnosis for pod in group.pods if (diagnosis := diagnose_pod(pod, now))]
    missing = group.expected_pods - len(group.pods)
    if missing > 0:
        found.append(_missing_pods(group))
    return min(found, key=lambda diagnosis: diagnosis.severity, default=None)


def leaving_text(pods: Iterable[Pod], who: str = "its old pods") -> str:
    """That pods are leaving, and for how long they may. Whether requests are still running is not known here."""
    return f"{who} are leaving{_time_to_leave(pods)}"


def _time_to_leave(pods: Iterable[Pod]) -> str:
    seconds = [drain_seconds_of(pod.grace_seconds) for pod in pods if pod.grace_seconds is not None]
    return f" (up to {max(seconds)} s for running requests)" if seconds else ""


def _missing_pods(group: Group) -> Diagnosis:
    """The StatefulSet controller says in an event why it cannot create a pod: a quota, an admission policy."""
    refused = next((event for event in group.events if event.reason == "FailedCreate"), None)
    if refused:
        return Diagnosis(Reason.POD_REFUSED, f"group {group.id.index}: {_one_line(refused.message)}")
    return Diagnosis(Reason.WAITING_FOR_PODS, f"group {group.id.index}: waiting for its pods to be created")


def diagnose_pod(pod: Pod, now: datetime) -> Diagnosis | None:
    """Why `pod` is not answering; None where it is."""
    if pod.deleting:
        if pod.condition("DisruptionTarget").get("status") == "True":
            return _say(pod, Reason.NODE_LOST, pod.condition("DisruptionTarget").get("message", "the pod is disrupted"))
        return _say(pod, Reason.DRAINING, f"the pod is leaving{_time_to_leave([pod])}")
    if pod.ready:
        return _not_calm(pod, now) or _out_of_service(pod)
    for question in (_ended_pod, _scheduling, _lost_node, _init_container, _waiting, _ended_container, _working):
        if diagnosis := question(pod, now):
            return diagnosis
    return _say(pod, Reason.STARTING, "the container is being created")


def _say(pod: Pod, reason: Reason, text: str) -> Diagnosis:
    return Diagnosis(reason, f"pod {pod.name}: {_one_line(text)}")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 700 else line[:699] + "…"


def _out_of_service(pod: Pod) -> Diagnosis | None:
    return None if pod.in_service else _say(pod, Reason.DRAINING, "taken out of service")


def _not_calm(pod: Pod, now: datetime) -> Diagnosis | None:
    """A container may be ready for a moment between two crashes; status does not call that ready."""
    started = pod.running_since
    if pod.restarts < 2 or started is None or now - started >= CALM:
        return None
    ended = _last_end(pod)
    if ended is None:
        return None
    cause = causes.of_end(ended, pod.events, pod.template)
    return _say(pod, cause.reason, f"{cause.text}; running again since {started:%H:%M:%S} UTC")


def _ended_pod(pod: Pod, _: datetime) -> Diagnosis | None:
    phase = pod.status.get("phase")
    if phase == "Failed" and pod.status.get("reason") == "Evicted":
        return _say(pod, Reason.EVICTED, pod.status.get("message", "evicted by the kubelet"))
    if phase in ("Failed", "Succeeded") and not pod.container:
        return _say(pod, Reason.POD_REFUSED, pod.status.get("message", f"the pod is {phase}"))
    return None


def _scheduling(pod: Pod, _: datetime) -> Diagnosis | None:
    scheduled = pod.condition("PodScheduled")
    if scheduled.get("status") == "True":
        return None
    if scheduled.get("reason") == "Unschedulable":
        cause = causes.of_scheduling(scheduled.get("message", ""))
        return _say(pod, cause.reason, cause.text)
    return _say(pod, Reason.STARTING, "waiting for the scheduler")


def _lost_node(pod: Pod, _: datetime) -> Diagnosis | None:
    """The node controller marks pods of a silent node as not ready while their containers still say ready."""
    if pod.condition("Ready").get("status") != "True" and pod.container.get("ready"):
        return _say(pod, Reason.NODE_LOST, "the pod's node does not answer")
    return None


def _init_container(pod: Pod, _: datetime) -> Diagnosis | None:
    for container in pod.status.get("initContainerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated") or (container.get("lastState") or {}).get("terminated")
        if ended and ended.get("exitCode") and not container.get("ready"):
            text = f"init container {container.get('name')} ended with exit code {ended['exitCode']}"
            return _say(pod, Reason.START_FAILED, f"{text}: {causes.first_line(ended)}".rstrip(": "))
    return None


def _waiting(pod: Pod, now: datetime) -> Diagnosis | None:
    waiting = pod.state.get("waiting")
    if not waiting:
        return None
    if cause := causes.of_waiting(waiting):
        secrets = causes.pull_secrets_missing(pod.events) if cause.reason is Reason.IMAGE_PULL_FAILED else None
        return _say(pod, cause.reason, f"{cause.text.rstrip('. ')}; {secrets}" if secrets else cause.text)
    if _last_end(pod) is None:
        waited = now - pod.created
        cause = causes.of_events(pod.events, _sandbox_since(pod)) if waited >= EVENTS_AFTER else None
        return _say(pod, cause.reason, cause.text) if cause else None
    return None


def _sandbox_since(pod: Pod) -> datetime | None:
    sandbox = pod.condition("PodReadyToStartContainers")
    return parse_time(sandbox.get("lastTransitionTime")) if sandbox.get("status") == "True" else None


def _last_end(pod: Pod) -> dict[str, object] | None:
    for state in (pod.state, pod.container.get("lastState") or {}):
        if ended := state.get("terminated"):
            return dict(ended)
    return None


def _ended_container(pod: Pod, now: datetime) -> Diagnosis | None:
    ended = _last_end(pod)
    if ended is None:
        return None
    finished = parse_time(str(ended.get("finishedAt") or "") or None)
    running = "running" in pod.state
    if running and finished and now - finished > CRASH_MEMORY:
        return None
    cause = causes.of_end(ended, pod.events, pod.template)
    tail = f" (restarted {pod.restarts} times)" if pod.restarts > 1 else ""
    if running and (now_doing := progress.describe(pod, now)) and now_doing.text != cause.text:
        tail += f"; now {now_doing.reason.value}: {now_doing.text}"
    return _say(pod, cause.reason, cause.text + tail)


def _working(pod: Pod, now: datetime) -> Diagnosis | None:
    if "running" not in pod.state:
        return None
    cause = progress.describe(pod, now)
    return _say(pod, cause.reason, cause.text) if cause else None

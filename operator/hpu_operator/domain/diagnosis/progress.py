"""What a running container says of itself through its control endpoint.

Ages come from the endpoint: a restart of the operator resets no clock.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from hpu_engine.contract import ControlState, Phase
from hpu_operator.api.reasons import Reason
from hpu_operator.domain.diagnosis.causes import Cause, of_engine
from hpu_operator.domain.observed import Group, Pod, Unreachable

GRACE = timedelta(seconds=60)
"""From a container's start until its control port must answer: the engine's does from its first second, on a machine
that has time for it."""

SILENCE_SECONDS = 15.0
"""Of the control endpoint until it is called unreachable: the kubelet may take as long to tell of a container's end."""

STALLED_AFTER_SECONDS = 120.0

PROBE_GRACE_SECONDS = 10.0
"""From the engine's readiness until the kubelet must have seen it; until then its events are about the time before."""

_PHASES = {
    Phase.STARTING: Reason.STARTING,
    Phase.FETCHING: Reason.FETCHING,
    Phase.LOADING: Reason.LOADING,
    Phase.CONNECTING: Reason.CONNECTING,
    Phase.WARMING_UP: Reason.WARMING_UP,
    Phase.DRAINING: Reason.DRAINING,
}
_MOVING = {Phase.STARTING, Phase.FETCHING, Phase.LOADING, Phase.CONNECTING, Phase.WARMING_UP}


def describe(pod: Pod, now: datetime) -> Cause | None:
    """What a running pod that is not ready is doing; None where that is not known yet."""
    control = pod.control
    if control is None:
        return Cause(Reason.WAITING_FOR_CONTROL, "waiting for the control endpoint")
    if isinstance(control, Unreachable):
        return _silent(pod, control, now)
    if control.phase is Phase.READY:
        return _not_passed_on(pod, control)
    if control.phase is Phase.FAILED:
        return _failing(pod, control)
    if control.phase in _MOVING and control.seconds_since_progress >= STALLED_AFTER_SECONDS:
        minutes = int(control.seconds_since_progress // 60)
        return Cause(Reason.STALLED, f"{control.phase.value} has not moved for {minutes} minutes; {_detail(control)}")
    return Cause(_PHASES[control.phase], _detail(control))


def _failing(pod: Pod, control: ControlState) -> Cause:
    if control.last_error is None:
        return Cause(Reason.CRASH_LOOP, "the engine reports a failure and is ending")
    return of_engine(control.last_error, pod.template)


def _silent(pod: Pod, control: Unreachable, now: datetime) -> Cause:
    """A pod is unreachable only once it has run for a while, as the kubelet says, and has been silent for a while."""
    started = pod.running_since
    if started is None or now - started < GRACE or not is_lasting(control):
        return Cause(Reason.WAITING_FOR_CONTROL, "waiting for the control endpoint")
    return Cause(Reason.CONTROL_UNREACHABLE, control.error)


def is_lasting(silence: Unreachable) -> bool:
    """Whether the silence lasts longer than the kubelet may take to report that the container ended."""
    return silence.for_seconds >= SILENCE_SECONDS


def _not_passed_on(pod: Pod, control: ControlState) -> Cause:
    for event in reversed(pod.events) if probe_is_due(control) else ():
        if event.reason == "Unhealthy" and event.message.startswith("Readiness"):
            return Cause(Reason.PROBE_FAILING, event.message)
    return Cause(Reason.STARTING, "ready; waiting for the kubelet's probe")


def probe_is_due(control: ControlState) -> bool:
    """Whether the engine has been ready for long enough that the kubelet must have noticed."""
    return control.phase is Phase.READY and control.seconds_since_progress >= PROBE_GRACE_SECONDS


def _detail(control: ControlState) -> str:
    if control.phase is Phase.WARMING_UP:
        done, total = warm_up(control)
        current = next((rank.warm_up.current for rank in control.ranks if rank.warm_up.current), None)
        return f"{done}/{total} shapes run" + (f", now {current}" if current else "")
    if control.phase in (Phase.LOADING, Phase.FETCHING):
        loaded = sum(rank.loaded_bytes for rank in control.ranks)
        total = sum(rank.total_bytes for rank in control.ranks)
        return f"{loaded / 1e9:.1f} of {total / 1e9:.1f} GB" if total else f"{control.phase.value.lower()} the model"
    return {
        Phase.STARTING: "the engine is starting",
        Phase.CONNECTING: "the ranks are finding each other",
        Phase.DRAINING: "running requests are finishing",
    }.get(control.phase, control.phase.value)


def warm_up(control: ControlState) -> tuple[int, int]:
    """Shapes run and their total, over all ranks of a pod."""
    return sum(rank.warm_up.done for rank in control.ranks), sum(rank.warm_up.total for rank in control.ranks)


def group_warm_up(group: Group) -> tuple[int, int] | None:
    """The same over all pods of a group; None where no pod has answered yet."""
    states = [warm_up(pod.control) for pod in group.pods if isinstance(pod.control, ControlState)]
    return (sum(done for done, _ in states), sum(total for _, total in states)) if states else None


def is_warm(group: Group) -> bool:
    """Whether every pod has run all of its shapes. A ready pod has, even if it was never asked."""
    return len(group.pods) >= group.expected_pods and all(
        pod.ready or (isinstance(pod.control, ControlState) and pod.control.phase is Phase.READY) for pod in group.pods
    )

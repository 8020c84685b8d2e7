"""Why a pod is not answering, from statuses and events that a real kubelet 1.37 wrote."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from hpu_engine.contract import FailureReason, Phase, TerminationMessage
from hpu_operator.api.reasons import Reason
from hpu_operator.domain.diagnosis.questions import CALM, CRASH_MEMORY, diagnose_group, diagnose_pod
from hpu_operator.domain.observed import Event, Group, Unreachable
from hpu_operator.domain.timestamps import parse_time
from tests.operator.objects import NOW, REVISION, control, group, pod, recorded

RECORDED = {
    "cards-insufficient": (Reason.NO_CAPACITY, "1 Insufficient habana.ai/gaudi"),
    "selector-mismatch": (Reason.NO_MATCHING_NODE, "didn't match Pod's node affinity/selector"),
    "pvc-missing": (Reason.VOLUME_MISSING, "PersistentVolumeClaim absent does not exist"),
    "pvc-unbound": (Reason.VOLUME_MISSING, "not bound to a volume"),
    "image-pull": (Reason.IMAGE_PULL_FAILED, "registry.example/absent:1"),
    "image-pull-dns-failure": (Reason.IMAGE_PULL_FAILED, "registry.invalid/absent:1"),
    "image-never-pull": (Reason.IMAGE_PULL_FAILED, "not present with pull policy of Never"),
    "secret-env-missing": (Reason.SECRET_MISSING, 'secret "absent" not found'),
    "secret-key-missing": (Reason.SECRET_MISSING, "couldn't find key absent in Secret default/present"),
    "secret-volume-missing": (Reason.SECRET_MISSING, 'secret "absent" not found'),
    "run-as-non-root": (Reason.POD_REFUSED, "image will run as root"),
    "start-error": (Reason.START_FAILED, "/no/such/binary"),
    "start-error-backoff": (Reason.START_FAILED, "/no/such/binary"),
    "init-failing": (Reason.START_FAILED, "init container fetch ended with exit code 3"),
    "crashloop": (Reason.CRASH_LOOP, "exit code 1: reason: bad weights"),
    "crashloop-backoff": (Reason.CRASH_LOOP, "exit code 1: reason: bad weights"),
    "oom-killed": (Reason.OUT_OF_MEMORY, "killed at its memory limit"),
    "liveness-kill": (Reason.LIVENESS_FAILED, "Liveness probe failed: heartbeat lost"),
    "startup-kill": (Reason.LIVENESS_FAILED, "Startup probe failed"),
    "evicted-ephemeral": (Reason.EVICTED, "ephemeral local storage usage exceeds"),
    "node-lost": (Reason.NODE_LOST, "Taint manager"),
    "terminating-prestop": (Reason.DRAINING, "the pod is leaving"),
    "completed": (Reason.CRASH_LOOP, "exit code 0"),
}


@pytest.mark.parametrize(("case", "expected"), RECORDED.items(), ids=list(RECORDED))
def test_recorded_case(case: str, expected: tuple[Reason, str]) -> None:
    diagnosis = diagnose_pod(recorded(case), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is expected[0]
    assert expected[1] in diagnosis.message
    assert diagnosis.message.startswith("pod smol-0: ")


def test_a_ready_pod_has_no_diagnosis() -> None:
    assert diagnose_pod(recorded("ready"), NOW) is None


def test_a_failing_readiness_probe_is_named_when_the_engine_says_ready() -> None:
    diagnosis = diagnose_pod(recorded("readiness-failing", control=control(Phase.READY, idle_seconds=12)), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.PROBE_FAILING
    assert "warming 3/40" in diagnosis.message


def test_a_probe_that_failed_while_warming_up_is_not_held_against_an_engine_that_has_just_become_ready() -> None:
    diagnosis = diagnose_pod(recorded("readiness-failing", control=control(Phase.READY, idle_seconds=1)), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.STARTING


def test_a_young_pod_is_starting_whatever_its_events_say() -> None:
    diagnosis = diagnose_pod(recorded("secret-volume-missing", age=timedelta(seconds=5)), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.STARTING


def waiting(reason: str, message: str = "", *events: Event) -> Any:
    status = {
        "conditions": [{"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [
            {"name": "engine", "restartCount": 0, "state": {"waiting": {"reason": reason, "message": message}}}
        ],
    }
    return pod(status=status, events=events)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([Event("Normal", "Pulling", 'Pulling image "engine:1"')], Reason.PULLING_IMAGE),
        ([Event("Normal", "Pulling", "Pulling"), Event("Normal", "Pulled", "Pulled")], Reason.STARTING),
        ([Event("Warning", "FailedMount", 'configmap "settings" not found')], Reason.CONFIG_MAP_MISSING),
        ([Event("Warning", "FailedMount", "references non-existent config key: a.json")], Reason.CONFIG_MAP_MISSING),
        ([Event("Warning", "FailedMount", "references non-existent secret key: token")], Reason.SECRET_MISSING),
        ([Event("Warning", "FailedMount", "mount failed: exit status 32")], Reason.VOLUME_NOT_MOUNTED),
        ([Event("Warning", "FailedAttachVolume", "Multi-Attach error for volume")], Reason.VOLUME_NOT_MOUNTED),
        ([Event("Warning", "FailedCreatePodSandBox", "cni: no address")], Reason.START_FAILED),
        ([], Reason.STARTING),
    ],
)
def test_a_container_that_stays_in_creation_is_explained_by_events(events: list[Event], reason: Reason) -> None:
    diagnosis = diagnose_pod(waiting("ContainerCreating", "", *events), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is reason


def test_a_failed_pull_names_the_registry_secret_that_does_not_exist() -> None:
    said = "Unable to retrieve some image pull secrets (registry); attempting to pull the image may not succeed."
    lost = Event("Warning", "FailedToRetrieveImagePullSecret", said)
    diagnosis = diagnose_pod(waiting("ImagePullBackOff", 'Back-off pulling image "r/x:1": denied.', lost), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.IMAGE_PULL_FAILED
    assert 'r/x:1": denied; Unable to retrieve some image pull secrets (registry)' in diagnosis.message


LATE = 'persistentvolumeclaims "models" is forbidden: User "system:node:n1" cannot get resource: no relationship found'


@pytest.mark.parametrize(
    ("lasted", "reason"),
    [(0, Reason.STARTING), (29, Reason.STARTING), (30, Reason.VOLUME_NOT_MOUNTED)],
)
def test_a_node_that_does_not_know_its_pod_yet_is_blamed_only_when_that_lasts(lasted: int, reason: Reason) -> None:
    late = Event("Warning", "FailedMount", LATE, NOW - timedelta(seconds=lasted), NOW)
    diagnosis = diagnose_pod(waiting("ContainerCreating", "", late), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is reason


@pytest.mark.parametrize(("failed_ago", "reason"), [(20, Reason.STARTING), (5, Reason.VOLUME_NOT_MOUNTED)])
def test_a_failed_mount_is_not_blamed_once_the_sandbox_stands(failed_ago: int, reason: Reason) -> None:
    moment = NOW - timedelta(seconds=failed_ago)
    found = waiting("ContainerCreating", "", Event("Warning", "FailedMount", "exit status 32", moment, moment))
    stands = {
        "type": "PodReadyToStartContainers",
        "status": "True",
        "lastTransitionTime": (NOW - timedelta(seconds=10)).isoformat(),
    }
    status = dict(found.status) | {"conditions": [*found.status["conditions"], stands]}
    diagnosis = diagnose_pod(replace(found, status=status), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is reason


def test_a_missing_config_map_is_not_a_missing_secret() -> None:
    diagnosis = diagnose_pod(waiting("CreateContainerConfigError", 'configmap "settings" not found'), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.CONFIG_MAP_MISSING


def ended(message: str, *, state: str, exit_code: int = 3, restarts: int = 4, **extra: Any) -> Any:
    """A container that has ended, caught in one of the states a snapshot may show."""
    terminated = {
        "exitCode": exit_code,
        "reason": "Error",
        "message": message,
        "finishedAt": (NOW - timedelta(seconds=20)).isoformat(),
    } | extra
    shown: dict[str, dict[str, Any]] = {
        "waiting": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        "terminated": {"terminated": terminated},
        "running": {"running": {"startedAt": (NOW - timedelta(seconds=3)).isoformat()}},
    }
    now = shown[state]
    status = {
        "phase": "Running",
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}],
        "containerStatuses": [
            {
                "name": "engine",
                "restartCount": restarts,
                "ready": False,
                "state": now,
                "lastState": {"terminated": terminated},
            }
        ],
    }
    return pod(ready=False, status=status, control=Unreachable("connection refused"))


ENGINE_REASONS = {
    FailureReason.MODEL_NOT_FOUND: Reason.MODEL_NOT_FOUND,
    FailureReason.MODEL_BROKEN: Reason.MODEL_BROKEN,
    FailureReason.MODEL_UNSUPPORTED: Reason.MODEL_UNSUPPORTED,
    FailureReason.USAGE: Reason.BAD_ARGUMENTS,
    FailureReason.PORT_TAKEN: Reason.BAD_ARGUMENTS,
    FailureReason.INSUFFICIENT_MEMORY: Reason.INSUFFICIENT_MEMORY,
    FailureReason.WORKER_LOST: Reason.WORKER_LOST,
    FailureReason.WORKER_FROZEN: Reason.WORKER_LOST,
    FailureReason.PEER_LOST: Reason.WORKER_LOST,
    FailureReason.MISMATCH: Reason.CRASH_LOOP,
    FailureReason.INTERNAL: Reason.CRASH_LOOP,
}


@pytest.mark.parametrize("said", list(FailureReason))
@pytest.mark.parametrize("state", ["waiting", "terminated", "running"])
def test_the_engines_own_words_decide_whatever_state_the_snapshot_shows(said: FailureReason, state: str) -> None:
    text = TerminationMessage(reason=said, message="no config.json", path="/mnt/model/absent", rank=0).encode().decode()
    diagnosis = diagnose_pod(ended(text, state=state), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is ENGINE_REASONS[said]
    assert "no config.json" in diagnosis.message
    assert "/mnt/model/absent" in diagnosis.message


def test_evidence_that_the_message_already_names_is_not_repeated() -> None:
    text = TerminationMessage(reason=FailureReason.MODEL_NOT_FOUND, message="/a/b does not exist", path="/a/b")
    diagnosis = diagnose_pod(ended(text.encode().decode(), state="waiting"), NOW)
    assert diagnosis is not None
    assert diagnosis.message == "pod smol-0: spec.model.uri: /a/b does not exist (restarted 4 times)"


def test_what_the_engine_says_while_it_ends_is_said_once() -> None:
    text = TerminationMessage(reason=FailureReason.MODEL_NOT_FOUND, message="a checkpoint is needed")
    found = ended(text.encode().decode(), state="running", restarts=1)
    diagnosis = diagnose_pod(replace(found, control=control(Phase.FAILED, last_error=text)), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.MODEL_NOT_FOUND
    assert diagnosis.message == "pod smol-0: spec.model.uri: a checkpoint is needed"


def test_a_first_failure_has_its_own_reason_while_the_container_still_runs() -> None:
    text = TerminationMessage(reason=FailureReason.MODEL_BROKEN, message="cut short")
    diagnosis = diagnose_pod(pod(ready=False, control=control(Phase.FAILED, last_error=text)), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.MODEL_BROKEN


def test_the_kubelets_verdict_of_memory_goes_before_an_old_message() -> None:
    diagnosis = diagnose_pod(ended("anything", state="waiting", reason="OOMKilled", exitCode=137), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.OUT_OF_MEMORY


def test_a_worker_that_was_lost_shows_how_far_the_restart_is() -> None:
    text = TerminationMessage(reason=FailureReason.WORKER_LOST, message="rank 0 lost its worker", signal="SIGKILL")
    found = ended(text.encode().decode(), state="running", restarts=1)
    restarted = pod(ready=False, status=dict(found.status), control=control(Phase.WARMING_UP, done=3, total=5))
    diagnosis = diagnose_pod(restarted, NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.WORKER_LOST
    assert "SIGKILL" in diagnosis.message
    assert "now WarmingUp: 3/5 shapes run" in diagnosis.message


def test_an_end_of_long_ago_explains_nothing_any_more() -> None:
    finished = (NOW - CRASH_MEMORY - timedelta(seconds=1)).isoformat()
    found = ended("boom", state="running", finishedAt=finished)
    later = pod(ready=False, status=dict(found.status), control=control(Phase.LOADING))
    diagnosis = diagnose_pod(later, NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.LOADING


def between_crashes(started_ago: timedelta) -> Any:
    found = ended("boom", state="running", exit_code=1, restarts=3)
    status = dict(found.status)
    status["conditions"] = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]
    running = {"running": {"startedAt": (NOW - started_ago).isoformat()}}
    status["containerStatuses"] = [{**status["containerStatuses"][0], "ready": True, "state": running}]
    return pod(status=status, control=control(Phase.READY))


def test_a_container_that_is_ready_between_two_crashes_is_not_called_ready() -> None:
    diagnosis = diagnose_pod(between_crashes(timedelta(seconds=20)), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.CRASH_LOOP
    assert "exit code 1: boom" in diagnosis.message


def test_a_container_that_has_calmed_down_is_ready() -> None:
    assert diagnose_pod(between_crashes(CALM), NOW) is None


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        (None, Reason.WAITING_FOR_CONTROL, "waiting for the control endpoint"),
        (control(Phase.STARTING), Reason.STARTING, "the engine is starting"),
        (control(Phase.FETCHING), Reason.FETCHING, "fetching the model"),
        (control(Phase.LOADING), Reason.LOADING, "loading the model"),
        (control(Phase.CONNECTING), Reason.CONNECTING, "finding each other"),
        (control(Phase.WARMING_UP, done=37, total=72), Reason.WARMING_UP, "37/72 shapes run"),
        (control(Phase.DRAINING), Reason.DRAINING, "finishing"),
        (control(Phase.WARMING_UP, done=37, total=72, idle_seconds=130), Reason.STALLED, "has not moved for 2 minutes"),
        (control(Phase.READY), Reason.STARTING, "waiting for the kubelet's probe"),
        (control(Phase.READY, idle_seconds=10_000), Reason.STARTING, "waiting for the kubelet's probe"),
        (Unreachable("connection refused", 15.0), Reason.CONTROL_UNREACHABLE, "connection refused"),
    ],
)
def test_a_running_container_says_itself_what_it_does(state: Any, reason: Reason, text: str) -> None:
    diagnosis = diagnose_pod(pod(ready=False, control=state), NOW)
    assert diagnosis is not None
    assert (diagnosis.reason, text in diagnosis.message) == (reason, True), diagnosis.message


@pytest.mark.parametrize(("age", "silent"), [(59, 59.0), (600, 14.0)], ids=["slow to start", "ended just now"])
def test_silence_is_held_against_no_container_that_is_starting_or_may_have_ended(age: int, silent: float) -> None:
    quiet = pod(ready=False, control=Unreachable("connection refused", silent), age=timedelta(seconds=age))
    diagnosis = diagnose_pod(quiet, NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.WAITING_FOR_CONTROL


def test_a_container_that_the_kubelet_does_not_call_running_is_not_unreachable() -> None:
    quiet = ended("boom", state="waiting", exit_code=1)
    diagnosis = diagnose_pod(replace(quiet, control=Unreachable("connection refused", 600.0)), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.CRASH_LOOP
    assert "Unreachable" not in diagnosis.message


def test_an_unreachable_control_endpoint_takes_no_readiness_away() -> None:
    assert diagnose_pod(pod(control=Unreachable("no route to host")), NOW) is None


def test_a_silent_node_is_told_before_its_pods_are_evicted() -> None:
    lost = pod()
    status = dict(lost.status)
    status["conditions"] = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}]
    diagnosis = diagnose_pod(pod(status=status), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.NODE_LOST


def without_pods(*events: Event) -> Group:
    whole = group(0)
    return Group(**{**vars(whole), "pods": (), "events": events})


def test_pods_that_cannot_be_created_are_explained_by_the_stateful_sets_events() -> None:
    quota = Event("Warning", "FailedCreate", 'pods "x" is forbidden: exceeded quota: small')
    diagnosis = diagnose_group(without_pods(quota), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.POD_REFUSED
    assert "exceeded quota: small" in diagnosis.message


def test_a_group_without_pods_waits_for_them() -> None:
    diagnosis = diagnose_group(without_pods(), NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.WAITING_FOR_PODS


def test_a_groups_gravest_pod_speaks_for_it() -> None:
    mixed = group(
        0,
        REVISION,
        pod(ready=False, control=control(Phase.WARMING_UP, done=1, total=2)),
        pod(ready=False, name="smol-1", status=dict(recorded("oom-killed").status)),
    )
    diagnosis = diagnose_group(mixed, NOW)
    assert diagnosis is not None
    assert diagnosis.reason is Reason.OUT_OF_MEMORY
    assert "pod smol-1" in diagnosis.message


def test_a_message_is_one_bounded_line() -> None:
    diagnosis = diagnose_pod(ended("x" * 4000 + "\nmore", state="waiting", exit_code=1), NOW)
    assert diagnosis is not None
    assert "\n" not in diagnosis.message
    assert len(diagnosis.message) < 800


def test_times_of_the_recordings_have_their_zone() -> None:
    moment = parse_time("2026-11-30T12:14:36Z")
    assert moment is not None
    assert moment.utcoffset() == timedelta(0)

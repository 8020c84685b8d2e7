"""Containers that run and end, or run and are not well."""

from __future__ import annotations

from hpu_operator.api.reasons import Reason
from tests.recordings import pods
from tests.recordings.recorder import Recorder, Seen


def restarted(pod: Seen, times: int = 1) -> bool:
    return pod.container.get("restartCount", 0) >= times and bool(pod.last_end)


def test_a_crash_leaves_exit_code_and_termination_message(recorder: Recorder) -> None:
    pod = recorder.wait("crash", restarted)
    assert (pod.last_end["exitCode"], pod.last_end["reason"]) == (3, "Error")
    assert pod.last_end["message"].strip() == pods.FIRST_LINE
    assert pod.status["phase"] == "Running"
    # The state may be waiting (CrashLoopBackOff), terminated or running by chance; events and counts are not.
    pod = recorder.wait(
        "crash",
        lambda pod: restarted(pod, times=2) and bool(pod.messages("BackOff")) and pod.reason is Reason.CRASH_LOOP,
    )
    assert pod.last_end["exitCode"] == 3
    assert pods.FIRST_LINE in str(pod.diagnosis())


def test_a_kill_for_memory_has_its_own_reason(recorder: Recorder) -> None:
    # The first end may read "Error": containerd hears of the kernel's kill a moment later.
    pod = recorder.wait(
        "memory",
        lambda pod: restarted(pod) and pod.last_end["reason"] == "OOMKilled" and bool(pod.messages("BackOff")),
    )
    assert pod.last_end["exitCode"] == 137
    # No event of the pod speaks of it: its status alone does.
    assert not any("OOM" in f"{event.get('reason')} {event.get('message')}" for event in pod.events)
    assert pod.reason is Reason.OUT_OF_MEMORY


def test_a_failing_readiness_probe_is_explained_by_an_event_alone(recorder: Recorder) -> None:
    pod = recorder.wait("unready", lambda pod: bool(pod.messages("Unhealthy")) and pod.container.get("started") is True)
    assert "running" in pod.container["state"]
    assert pod.container["ready"] is False
    assert pod.condition("Ready")["reason"] == "ContainersNotReady"
    assert pod.messages("Unhealthy")[-1].startswith("Readiness probe failed")
    assert "no heartbeat" in pod.messages("Unhealthy")[-1]
    assert pod.container["restartCount"] == 0


def test_a_failing_liveness_probe_looks_like_a_kill_but_for_its_events(recorder: Recorder) -> None:
    pod = recorder.wait(
        "dead",
        lambda pod: restarted(pod, times=2) and bool(pod.messages("Killing")) and pod.reason is Reason.LIVENESS_FAILED,
    )
    assert (pod.last_end["exitCode"], pod.last_end["reason"]) == (137, "Error")
    assert any(message.startswith("Liveness probe failed") for message in pod.messages("Unhealthy"))


def test_a_pod_that_ends_gracefully_stays_ready_but_gets_no_new_clients(recorder: Recorder) -> None:
    recorder.wait("graceful", lambda pod: pod.condition("Ready").get("status") == "True")
    recorder.delete("graceful")
    pod = recorder.wait(
        "graceful",
        lambda pod: bool(pod.messages("Killing")) and endpoint(recorder, pod).get("terminating") is True,
        timeout_seconds=pods.ENDS_AFTER_SECONDS - 5,
    )
    assert pod.live["metadata"]["deletionGracePeriodSeconds"] == pods.GRACE_SECONDS
    assert pod.live["metadata"]["deletionTimestamp"]
    assert pod.condition("Ready")["status"] == "True"
    assert "running" in pod.container["state"]
    conditions = endpoint(recorder, pod)
    assert (conditions["ready"], conditions["serving"]) == (False, True)
    assert pod.reason is Reason.DRAINING
    assert recorder.gone_after("graceful", timeout_seconds=pods.GRACE_SECONDS - 5) > 0


def endpoint(recorder: Recorder, pod: Seen) -> dict[str, bool]:
    """The conditions of the pod's endpoint in its Service's slices."""
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{recorder.namespace}/endpointslices"
    found = recorder.fleet.api.request("GET", f"{slices}?labelSelector=kubernetes.io/service-name=graceful")["items"]
    assert isinstance(found, list)
    for entry in (entry for one in found for entry in one.get("endpoints") or []):
        if entry["targetRef"]["uid"] == pod.live["metadata"]["uid"]:
            return dict(entry["conditions"])
    return {}

"""Pods that do not come to run: for want of cards, an image, a Secret, a volume."""

from __future__ import annotations

from hpu_operator.api.reasons import Reason
from tests.recordings import pods
from tests.recordings.recorder import Recorder, Seen


def test_a_pod_that_finds_no_cards_stays_pending_and_the_scheduler_says_why(recorder: Recorder) -> None:
    short = "Insufficient habana.ai/gaudi"
    pod = recorder.wait(
        "cards-insufficient",
        lambda pod: (
            short in pod.condition("PodScheduled").get("message", "")
            and any(short in message for message in pod.messages("FailedScheduling"))
        ),
    )
    assert pod.status["phase"] == "Pending"
    scheduled = pod.condition("PodScheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable")
    assert "containerStatuses" not in pod.status
    assert pod.reason is Reason.NO_CAPACITY


def test_a_kubelet_refuses_a_pod_that_was_bound_to_it_without_cards(recorder: Recorder) -> None:
    pod = recorder.wait(
        "cards-refused",
        lambda pod: pod.status.get("phase") == "Failed" and bool(pod.messages("UnexpectedAdmissionError")),
    )
    assert "habana.ai/gaudi" in pod.messages("UnexpectedAdmissionError")[-1]
    assert pod.status["reason"] == "UnexpectedAdmissionError"
    assert "habana.ai/gaudi" in pod.status["message"]
    assert "containerStatuses" not in pod.status
    assert pod.reason is Reason.POD_REFUSED


def test_an_image_that_cannot_be_pulled_alternates_between_two_reasons(recorder: Recorder) -> None:
    # Made here: a kubelet that has failed for a while pulls every five minutes.
    recorder.create(pods.pod("image-absent", container={"image": "localhost:1/absent:1"}))
    seen = set()

    def both(pod: Seen) -> bool:
        if pod.waiting.get("reason") in ("ErrImagePull", "ImagePullBackOff"):
            seen.add(pod.waiting["reason"])
        refused = any("connection refused" in message for message in pod.messages("Failed"))
        return len(seen) == 2 and refused and bool(pod.messages("Pulling"))

    pod = recorder.wait("image-absent", both, timeout_seconds=120)
    assert pod.status["phase"] == "Pending"
    assert "localhost:1/absent:1" in pod.waiting["message"]
    assert pod.reason is Reason.IMAGE_PULL_FAILED


def test_an_image_that_may_not_be_pulled_has_a_reason_of_its_own(recorder: Recorder) -> None:
    pod = recorder.wait("image-never", lambda pod: pod.waiting.get("reason") == "ErrImageNeverPull")
    assert "localhost/absent:1" in pod.waiting["message"]
    assert pod.reason is Reason.IMAGE_PULL_FAILED


def test_a_secret_missing_for_the_environment_is_named_in_the_container_status(recorder: Recorder) -> None:
    pod = recorder.wait(
        "secret-env",
        lambda pod: pod.waiting.get("reason") == "CreateContainerConfigError" and bool(pod.messages("Failed")),
    )
    assert 'secret "absent" not found' in pod.messages("Failed")[-1]
    assert pod.waiting["message"] == 'secret "absent" not found'
    assert pod.status["phase"] == "Pending"
    assert pod.reason is Reason.SECRET_MISSING


def test_a_secret_missing_as_a_volume_is_told_by_an_event_alone(recorder: Recorder) -> None:
    pod = recorder.wait("secret-volume", lambda pod: bool(pod.messages("FailedMount")) and bool(pod.waiting))
    assert pod.waiting == {"reason": "ContainerCreating"}
    assert 'secret "absent" not found' in pod.messages("FailedMount")[-1]
    pod = recorder.wait("secret-volume", lambda pod: pod.reason is Reason.SECRET_MISSING)
    assert "absent" in str(pod.diagnosis())


def test_a_missing_claim_keeps_the_pod_from_being_scheduled(recorder: Recorder) -> None:
    pod = recorder.wait(
        "claim-absent", lambda pod: bool(pod.condition("PodScheduled")) and bool(pod.messages("FailedScheduling"))
    )
    assert pod.condition("PodScheduled")["reason"] == "Unschedulable"
    assert 'persistentvolumeclaim "absent" not found' in pod.condition("PodScheduled")["message"]
    assert pod.reason is Reason.VOLUME_MISSING

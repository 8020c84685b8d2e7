"""Pods that do not come to run: for want of cards, an image, a Secret, a volume."""

from __future__ import annotations

from hpu_operator.api.reasons import Reason
from tests.recordings.recorder import Recorder, Seen


def reason(pod: Seen) -> Reason | None:
    diagnosis = pod.diagnosis()
    return diagnosis.reason if diagnosis else None


def test_a_pod_that_finds_no_cards_stays_pending_and_the_scheduler_says_why(recorder: Recorder) -> None:
    pod = recorder.wait("cards-insufficient", lambda pod: bool(pod.condition("PodScheduled")))
    assert pod.status["phase"] == "Pending"
    scheduled = pod.condition("PodScheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable")
    assert "Insufficient habana.ai/gaudi" in scheduled["message"]
    assert "containerStatuses" not in pod.status
    assert reason(pod) is Reason.NO_CAPACITY


def test_a_kubelet_refuses_a_pod_that_was_bound_to_it_without_cards(recorder: Recorder) -> None:
    pod = recorder.wait("cards-refused", lambda pod: pod.status.get("phase") == "Failed")
    assert pod.status["reason"] == "UnexpectedAdmissionError"
    assert "habana.ai/gaudi" in pod.status["message"]
    assert "containerStatuses" not in pod.status
    assert reason(pod) is Reason.POD_REFUSED


def test_an_image_that_cannot_be_pulled_alternates_between_two_reasons(recorder: Recorder) -> None:
    seen = set()

    def both(pod: Seen) -> bool:
        if pod.waiting.get("reason") in ("ErrImagePull", "ImagePullBackOff"):
            seen.add(pod.waiting["reason"])
        return len(seen) == 2

    pod = recorder.wait("image-absent", both)
    assert pod.status["phase"] == "Pending"
    assert "localhost:1/absent:1" in pod.waiting["message"]
    assert any("connection refused" in message for message in pod.messages("Failed"))
    assert pod.messages("Pulling")
    assert reason(pod) is Reason.IMAGE_PULL_FAILED


def test_an_image_that_may_not_be_pulled_has_a_reason_of_its_own(recorder: Recorder) -> None:
    pod = recorder.wait("image-never", lambda pod: pod.waiting.get("reason") == "ErrImageNeverPull")
    assert "localhost/absent:1" in pod.waiting["message"]
    assert reason(pod) is Reason.IMAGE_PULL_FAILED


def test_a_secret_missing_for_the_environment_is_named_in_the_container_status(recorder: Recorder) -> None:
    pod = recorder.wait("secret-env", lambda pod: pod.waiting.get("reason") == "CreateContainerConfigError")
    assert pod.waiting["message"] == 'secret "absent" not found'
    assert pod.status["phase"] == "Pending"
    assert reason(pod) is Reason.SECRET_MISSING


def test_a_secret_missing_as_a_volume_is_told_by_an_event_alone(recorder: Recorder) -> None:
    pod = recorder.wait("secret-volume", lambda pod: bool(pod.messages("FailedMount")))
    assert pod.waiting == {"reason": "ContainerCreating"}
    assert 'secret "absent" not found' in pod.messages("FailedMount")[-1]
    pod = recorder.wait("secret-volume", lambda pod: reason(pod) is Reason.SECRET_MISSING, timeout_seconds=20)
    assert "absent" in str(pod.diagnosis())


def test_a_missing_claim_keeps_the_pod_from_being_scheduled(recorder: Recorder) -> None:
    pod = recorder.wait("claim-absent", lambda pod: bool(pod.condition("PodScheduled")))
    assert pod.condition("PodScheduled")["reason"] == "Unschedulable"
    assert 'persistentvolumeclaim "absent" not found' in pod.condition("PodScheduled")["message"]
    assert pod.messages("FailedScheduling")
    assert reason(pod) is Reason.VOLUME_MISSING

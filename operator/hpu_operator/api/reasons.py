"""The closed list of reasons. A condition carries one of these words and no other.

Each has its cause, its remedy and a test that produces it; the reason catalogue is generated from here. The order is
the order of severity: where several groups or pods differ, the first in this list is what the object's conditions say.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    # The object itself.
    INVALID_SPEC = "InvalidSpec"
    NAME_TAKEN = "NameTaken"
    REJECTED = "Rejected"
    # A pod cannot work until something is changed.
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_BROKEN = "ModelBroken"
    MODEL_UNSUPPORTED = "ModelUnsupported"
    BAD_ARGUMENTS = "BadArguments"
    INSUFFICIENT_MEMORY = "InsufficientMemory"
    OUT_OF_MEMORY = "OutOfMemory"
    SECRET_MISSING = "SecretMissing"  # noqa: S105 - a word, no secret
    CONFIG_MAP_MISSING = "ConfigMapMissing"
    VOLUME_MISSING = "VolumeMissing"
    VOLUME_NOT_MOUNTED = "VolumeNotMounted"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    POD_REFUSED = "PodRefused"
    START_FAILED = "StartFailed"
    NO_MATCHING_NODE = "NoMatchingNode"
    NO_CAPACITY = "NoCapacity"
    # A pod was at work and failed.
    LIVENESS_FAILED = "LivenessFailed"
    WORKER_LOST = "WorkerLost"
    CRASH_LOOP = "CrashLoop"
    EVICTED = "Evicted"
    NODE_LOST = "NodeLost"
    STALLED = "Stalled"
    CONTROL_UNREACHABLE = "ControlUnreachable"
    PROBE_FAILING = "ProbeFailing"
    # On the way.
    PULLING_IMAGE = "PullingImage"
    WAITING_FOR_CLEANUP = "WaitingForCleanup"
    WAITING_FOR_PODS = "WaitingForPods"
    STARTING = "Starting"
    WAITING_FOR_CONTROL = "WaitingForControl"
    FETCHING = "Fetching"
    LOADING = "Loading"
    CONNECTING = "Connecting"
    WARMING_UP = "WarmingUp"
    ROLLING_OUT = "RollingOut"
    DRAINING = "Draining"
    # At rest.
    SCALED_TO_ZERO = "ScaledToZero"
    ACCEPTED = "Accepted"
    COMPLETE = "Complete"
    WARMED_UP = "WarmedUp"
    ANSWERING = "Answering"


@dataclass(frozen=True)
class Entry:
    """What a reason means to the person who reads it."""

    cause: str
    remedy: str


CATALOGUE: dict[Reason, Entry] = {
    Reason.INVALID_SPEC: Entry(
        "The stored object does not fit the operator's API; it was written under another version of the CRD.",
        "Change the field the message names, or install the CRD that belongs to this operator.",
    ),
    Reason.NAME_TAKEN: Entry(
        "An object that the operator did not make has the name of a child. It is left alone.",
        "Rename or delete the object the message names, or give this one another name.",
    ),
    Reason.REJECTED: Entry(
        "The API server refuses a child of this object, for example because of a quota or an admission policy.",
        "Read the server's answer in the message and change the field or the policy it names.",
    ),
    Reason.MODEL_NOT_FOUND: Entry(
        "The model's path does not exist, is not a folder, or has no config.json.",
        "Correct spec.model.uri, or put the checkpoint at the path the message names.",
    ),
    Reason.MODEL_BROKEN: Entry(
        "A file of the checkpoint is truncated, inconsistent or lacks a tensor.",
        "Copy the file the message names again; compare its size with the source.",
    ),
    Reason.MODEL_UNSUPPORTED: Entry(
        "The engine does not know the checkpoint's architecture, data type or position scaling.",
        "Serve another checkpoint, or an engine image that supports this one.",
    ),
    Reason.BAD_ARGUMENTS: Entry(
        "The engine refuses its settings, or its port is taken by something else in the pod.",
        "Change the field of spec.engine or the variable of spec.pod.env that the message names.",
    ),
    Reason.INSUFFICIENT_MEMORY: Entry(
        "The engine found that weights and cache do not fit into memory, and ended before it was killed.",
        "Lower spec.engine.maxModelLen or maxNumSeqs, or raise the memory in spec.pod.resources.",
    ),
    Reason.OUT_OF_MEMORY: Entry(
        "The kernel killed the container at its memory limit.",
        "Raise spec.pod.resources.limits.memory.",
    ),
    Reason.SECRET_MISSING: Entry(
        "A Secret, or a key of one, that the pod refers to does not exist.",
        "Create the Secret or key the message names in the object's namespace.",
    ),
    Reason.CONFIG_MAP_MISSING: Entry(
        "A ConfigMap, or a key of one, that the pod refers to does not exist.",
        "Create the ConfigMap or key the message names in the object's namespace.",
    ),
    Reason.VOLUME_MISSING: Entry(
        "A PersistentVolumeClaim does not exist or is not bound to a volume.",
        "Create the claim the message names, or a PersistentVolume that satisfies it.",
    ),
    Reason.VOLUME_NOT_MOUNTED: Entry(
        "The node cannot attach or mount a volume.",
        "Look at the storage system the message names; check access mode and node.",
    ),
    Reason.IMAGE_PULL_FAILED: Entry(
        "The node cannot fetch the engine image.",
        "Correct spec.pod.image, add a registry Secret to spec.pod.imagePullSecrets, or load the image onto the node.",
    ),
    Reason.POD_REFUSED: Entry(
        "Pods cannot be created, or the node refuses the container: a quota, a policy, or an image that runs as root.",
        "Follow the message: raise the quota, relax the policy, or use an image with a numeric non-root user.",
    ),
    Reason.START_FAILED: Entry(
        "The container's process or an init container cannot be started.",
        "Check that spec.pod.image contains hpu-engine; look at init containers that others add to the pod.",
    ),
    Reason.NO_MATCHING_NODE: Entry(
        "No node has the labels or tolerated taints the pod asks for.",
        "Change spec.pod.nodeSelector, affinity or tolerations, or label a node.",
    ),
    Reason.NO_CAPACITY: Entry(
        "Matching nodes have too little of a resource left.",
        "Free or add what the message names, or lower spec.pod.resources or spec.replicas.",
    ),
    Reason.LIVENESS_FAILED: Entry(
        "The kubelet restarted the container because /livez failed: the step loop or the start-up stopped moving.",
        "Look at the container's previous log; report it with the bucket or phase it shows.",
    ),
    Reason.WORKER_LOST: Entry(
        "A worker process died or froze; the pod ended its streams and restarts in place.",
        "Nothing if it recovers; if it repeats, look at the signal or exit code in the message.",
    ),
    Reason.CRASH_LOOP: Entry(
        "The engine keeps ending.",
        "Look at the exit code and first error line in the message, then at the container's previous log.",
    ),
    Reason.EVICTED: Entry(
        "The kubelet removed the pod because its node ran short of disk or memory.",
        "Raise the ephemeral-storage or memory request, or free the node.",
    ),
    Reason.NODE_LOST: Entry(
        "The node does not answer; its pods cannot be reached.",
        "Bring the node back, or delete its Node object so that its pods are placed elsewhere.",
    ),
    Reason.STALLED: Entry(
        "The engine answers, but its start-up has not moved for two minutes.",
        "Look at the container's log; a slow or hanging volume is the usual cause.",
    ),
    Reason.CONTROL_UNREACHABLE: Entry(
        "The container runs, but the operator gets no answer from its control port. Says nothing about the model.",
        "Allow the operator's pod to reach port 8001 of the engine pods (NetworkPolicy, mesh).",
    ),
    Reason.PROBE_FAILING: Entry(
        "The engine reports ready, but the kubelet's readiness probe fails.",
        "Read the probe's answer in the message; check that the node reaches the pod.",
    ),
    Reason.PULLING_IMAGE: Entry(
        "The node is fetching the engine image.",
        "Wait; a large image takes minutes on a node that does not have it yet.",
    ),
    Reason.WAITING_FOR_CLEANUP: Entry(
        "Children of an earlier object of the same name are still being removed.",
        "Wait for the garbage collector; its pods may still be draining.",
    ),
    Reason.WAITING_FOR_PODS: Entry(
        "The StatefulSet exists and its pods do not yet.", "Wait; if it stays, look at the controller manager."
    ),
    Reason.STARTING: Entry("The container is being created or has just started.", "Wait."),
    Reason.WAITING_FOR_CONTROL: Entry(
        "The container has just started and its control port does not answer yet.", "Wait for a few seconds."
    ),
    Reason.FETCHING: Entry("The engine is fetching the model.", "Wait; the message shows how far it is."),
    Reason.LOADING: Entry("The engine is loading weights.", "Wait; the message shows how far it is."),
    Reason.CONNECTING: Entry("The ranks of the group are finding each other.", "Wait for the group's other pods."),
    Reason.WARMING_UP: Entry("The engine is running each of its shapes once.", "Wait; the message shows the count."),
    Reason.ROLLING_OUT: Entry(
        "Groups are being brought to the revision and number the spec asks for.", "Wait; the message says which."
    ),
    Reason.DRAINING: Entry(
        "Pods of a group that is being replaced or removed are leaving; requests they still run may finish first.",
        "Wait for at most spec.drainSeconds and 20 seconds.",
    ),
    Reason.SCALED_TO_ZERO: Entry("spec.replicas is 0: nothing runs.", "Set spec.replicas to 1 or more."),
    Reason.ACCEPTED: Entry("The object is valid and its children are the operator's own.", "Nothing."),
    Reason.COMPLETE: Entry("Every group is of the revision the spec asks for and ready.", "Nothing."),
    Reason.WARMED_UP: Entry("Every group has run all of its shapes.", "Nothing."),
    Reason.ANSWERING: Entry("The groups have produced a real token and pass their readiness probe.", "Nothing."),
}

_SEVERITY = {reason: position for position, reason in enumerate(Reason)}
_FIRST_ON_THE_WAY = _SEVERITY[Reason.PULLING_IMAGE]


def severity(reason: Reason) -> int:
    """Position in the list: lower is worse."""
    return _SEVERITY[reason]


def is_failure(reason: Reason) -> bool:
    """Whether a person has to act or something has to recover, rather than time to pass."""
    return _SEVERITY[reason] < _FIRST_ON_THE_WAY

"""What the operator and the engine agree on: control endpoint, termination message, exit codes.

Torch-free, standard library and pydantic only: the operator imports it. Keys on the wire are camelCase. An operator can
talk to an older or a newer engine: a reader ignores keys it does not know and reads a reason it does not know as
`Internal`. None always means "not known"; sizes are bytes and times are seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from hpu_engine.planning.model.description import ModelDescription

TERMINATION_MESSAGE_LIMIT_BYTES = 4096
"""What a kubelet keeps of a container's termination log (Kubernetes, `pod.spec.containers.terminationMessagePath`)."""

CONTROL_PORT = 8001
API_PORT = 8000

STATE_PATH = "/state"
LIVENESS_PATH = "/livez"
READINESS_PATH = "/readyz"
METRICS_PATH = "/metrics"


_CAMEL = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")


class _Wire(BaseModel):
    model_config = ConfigDict(**_CAMEL, frozen=True)


@dataclass(frozen=True, kw_only=True)
class _Fact:
    """A fact that a worker reports and the control endpoint passes on: msgspec and pydantic both read dataclasses."""

    __pydantic_config__: ClassVar[ConfigDict] = _CAMEL


class Phase(StrEnum):
    """Where a pod, or one of its ranks, is on its way to an answer."""

    STARTING = "Starting"
    FETCHING = "Fetching"
    LOADING = "Loading"
    CONNECTING = "Connecting"
    WARMING_UP = "WarmingUp"
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"


class ExitCode(IntEnum):
    """Exit codes of `hpu-engine serve`."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    MODEL = 3
    RESOURCES = 4
    WORKER_LOST = 5
    GROUP = 6
    """The cause is in another pod of the group, or between the pods."""


class FailureReason(StrEnum):
    """Why an engine process ended. Each reason belongs to one exit code (`EXIT_CODES`)."""

    USAGE = "Usage"
    PORT_TAKEN = "PortTaken"
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_BROKEN = "ModelBroken"
    MODEL_UNSUPPORTED = "ModelUnsupported"
    INSUFFICIENT_MEMORY = "InsufficientMemory"
    WORKER_LOST = "WorkerLost"
    WORKER_FROZEN = "WorkerFrozen"
    PEER_LOST = "PeerLost"
    """The worker lost another worker of its group. It is never the cause of the group's end."""
    MISMATCH = "Mismatch"
    """The workers of a group did not settle on the same model, sizes or shapes."""
    INTERNAL = "Internal"

    @classmethod
    def _missing_(cls, value: object) -> FailureReason | None:
        return cls.INTERNAL if isinstance(value, str) else None


EXIT_CODES: dict[FailureReason, ExitCode] = {
    FailureReason.USAGE: ExitCode.USAGE,
    FailureReason.PORT_TAKEN: ExitCode.USAGE,
    FailureReason.MODEL_NOT_FOUND: ExitCode.MODEL,
    FailureReason.MODEL_BROKEN: ExitCode.MODEL,
    FailureReason.MODEL_UNSUPPORTED: ExitCode.MODEL,
    FailureReason.INSUFFICIENT_MEMORY: ExitCode.RESOURCES,
    FailureReason.WORKER_LOST: ExitCode.WORKER_LOST,
    FailureReason.WORKER_FROZEN: ExitCode.WORKER_LOST,
    FailureReason.PEER_LOST: ExitCode.GROUP,
    FailureReason.MISMATCH: ExitCode.GROUP,
    FailureReason.INTERNAL: ExitCode.INTERNAL,
}


class GroupMember(_Wire):
    """Which pod of which group this is: the operator's numbers, and the group's present life.

    `attempt` counts how often the group was placed anew. `epoch` is drawn when the group forms, and anew each time.
    """

    group: int
    revision: str
    attempt: int
    pod_index: int
    epoch: str | None = None

    @classmethod
    def from_pod_name(cls, name: str) -> GroupMember | None:
        """Read from `<object>-<revision>-<group>-<attempt>-<pod index>`; None where `name` has another form."""
        found = re.fullmatch(r".+-([0-9a-f]{8})-(\d+)-(\d+)-(\d+)", name)
        if found is None:
            return None
        revision, group, attempt, pod_index = found.groups()
        return cls(group=int(group), revision=revision, attempt=int(attempt), pod_index=int(pod_index))


class TerminationMessage(_Wire):
    """Evidence of a death, written by the server process of a pod and read by the operator.

    `path` and `tensor` name what was wrong with a model; `rank`, `worker` and `bucket` what was running where;
    `exit_code` and `signal` are those of the worker that was lost, not of the server. `seen_at` is when the server saw
    the end, in Unix seconds by its own clock: between pods of a group it only decides between equal causes.
    """

    reason: FailureReason
    message: str
    path: str | None = None
    tensor: str | None = None
    rank: int | None = None
    worker: int | None = None
    bucket: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    seen_at: float | None = None
    member: GroupMember | None = None

    def encode(self) -> bytes:
        """JSON of at most `TERMINATION_MESSAGE_LIMIT_BYTES`; a text that is too long loses its end, never its keys."""
        texts = {"message": self.message, "path": self.path, "tensor": self.tensor, "bucket": self.bucket}
        limit = TERMINATION_MESSAGE_LIMIT_BYTES
        while True:
            cut = {name: text if text is None else _shorten(text, limit) for name, text in texts.items()}
            data = self.model_copy(update=cut).model_dump_json(by_alias=True, exclude_none=True).encode()
            if len(data) <= TERMINATION_MESSAGE_LIMIT_BYTES:
                return data
            limit = limit * 3 // 4

    @classmethod
    def parse(cls, text: str) -> TerminationMessage | None:
        """The message in `text`, or None where it is not one (another image, a kubelet's own text)."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


class ModelRead(_Wire):
    """What a pod that only reads a model leaves as its termination message: the model part of a plan's input."""

    result: Literal["ModelRead"] = "ModelRead"
    model: ModelDescription

    def encode(self) -> bytes:
        """JSON. Raises ValueError where a kubelet would cut it."""
        data = self.model_dump_json(by_alias=True).encode()
        if len(data) > TERMINATION_MESSAGE_LIMIT_BYTES:
            raise ValueError(f"the description takes {len(data)} bytes; {TERMINATION_MESSAGE_LIMIT_BYTES} are kept")
        return data


def parse_ending(text: str) -> TerminationMessage | ModelRead | None:
    """What a container of ours left as its termination message; None for any other text."""
    try:
        return ModelRead.model_validate_json(text)
    except ValidationError:
        return TerminationMessage.parse(text)


@dataclass(frozen=True, kw_only=True)
class BucketRun(_Fact):
    """One bucket of a warm-up, after it ran. `compiled`: its recipe was not in the cache.

    `peak_bytes` and `free_bytes` are the card's memory in use at most while it ran, and left over after it. `skipped`:
    it did not fit, and no step uses it.
    """

    bucket: str
    seconds: float | None = None
    peak_bytes: int | None = None
    free_bytes: int | None = None
    compiled: bool | None = None
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class CardHealth(_Fact):
    """What the driver says of a worker's card. `problem` in its words."""

    healthy: bool
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class RecipeCache(_Fact):
    """Recipes found on disk and not found there since the start; what the cache takes on disk."""

    hits: int
    misses: int
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GateResult(_Fact):
    """Whether the answers that a new revision has to give before it serves were right. `message` says what was not."""

    passed: bool
    message: str | None = None


class WarmUp(_Wire):
    """How many buckets have been run, of how many, and which one runs now: of the worker that is furthest behind.

    `planned_seconds` is the longest that `current` is planned to take. `runs` are the buckets before it, in their
    order; `compiled` counts those whose recipes were not in the cache.
    """

    done: int = 0
    total: int = 0
    current: str | None = None
    planned_seconds: float | None = None
    compiled: int | None = None
    runs: tuple[BucketRun, ...] = ()


class WorkerState(_Wire):
    """One worker of a rank, and its card."""

    worker: int
    phase: Phase
    heartbeat_age_seconds: float | None = None
    card: CardHealth | None = None


class RankState(_Wire):
    """One data-parallel rank of the pod. `loaded_bytes` and `total_bytes` of weights, over its workers.

    `settled_digest` names what the rank settled on: type, limits, blocks, buckets. Ranks of one group have the same.
    """

    rank: int
    phase: Phase
    heartbeat_age_seconds: float | None = Field(description="Since the step loop last moved; null before it runs.")
    warm_up: WarmUp = WarmUp()
    loaded_bytes: int = 0
    total_bytes: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    first_seen_shapes: int = Field(0, description="Shapes that ran for the first time after warm-up.")
    last_error: str | None = None
    workers: tuple[WorkerState, ...] = ()
    settled_digest: str | None = None
    recipe_cache: RecipeCache | None = None


class ModelIdentity(_Wire):
    """What is being served. `max_model_len` in tokens, once loaded no more than the KV cache holds; `parameters`
    counted from the description.
    """

    served_name: str
    path: str
    architecture: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    parameters: int | None = None


class PlanInput(_Wire):
    """What the engine was asked for and settled on: the input of a plan."""

    device: str
    tensor: int = 1
    data: int = 1
    expert: int = 1
    block_size: int
    max_num_seqs: int
    max_batched_tokens: int
    kv_blocks: int | None = None


class ControlState(_Wire):
    """The whole answer of `GET /state` on the control port. Read-only.

    `downloaded_bytes` of `download_bytes` of the model have arrived in this pod. `gate` is known once it was tried.
    """

    phase: Phase
    seconds_since_progress: float
    uptime_seconds: float
    model: ModelIdentity
    plan_input: PlanInput
    ranks: tuple[RankState, ...]
    last_error: TerminationMessage | None = None
    engine_version: str
    member: GroupMember | None = None
    downloaded_bytes: int | None = None
    download_bytes: int | None = None
    gate: GateResult | None = None

"""What the operator and the engine agree on: control endpoint, termination message, exit codes.

Torch-free, standard library and pydantic only: the operator imports it. Keys on the wire are camelCase; a reader
ignores keys it does not know, so that an operator can talk to an older or a newer engine.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

TERMINATION_MESSAGE_LIMIT_BYTES = 4096
"""What a kubelet keeps of a container's termination log (Kubernetes, `pod.spec.containers.terminationMessagePath`)."""

CONTROL_PORT = 8001
API_PORT = 8000

STATE_PATH = "/state"
LIVENESS_PATH = "/livez"
READINESS_PATH = "/readyz"
METRICS_PATH = "/metrics"


class _Wire(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")


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
    INTERNAL = "Internal"


EXIT_CODES: dict[FailureReason, ExitCode] = {
    FailureReason.USAGE: ExitCode.USAGE,
    FailureReason.PORT_TAKEN: ExitCode.USAGE,
    FailureReason.MODEL_NOT_FOUND: ExitCode.MODEL,
    FailureReason.MODEL_BROKEN: ExitCode.MODEL,
    FailureReason.MODEL_UNSUPPORTED: ExitCode.MODEL,
    FailureReason.INSUFFICIENT_MEMORY: ExitCode.RESOURCES,
    FailureReason.WORKER_LOST: ExitCode.WORKER_LOST,
    FailureReason.WORKER_FROZEN: ExitCode.WORKER_LOST,
    FailureReason.INTERNAL: ExitCode.INTERNAL,
}


class TerminationMessage(_Wire):
    """Evidence of a death, written by the server process of a pod and read by the operator.

    `path` and `tensor` name what was wrong with a model; `rank`, `worker` and `bucket` what was running where;
    `exit_code` and `signal` are those of the worker that was lost, not of the server.
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


class WarmUp(_Wire):
    """How many buckets have been run, of how many, and which one runs now."""

    done: int = 0
    total: int = 0
    current: str | None = None


class RankState(_Wire):
    """One data-parallel rank of the pod."""

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
    """The whole answer of `GET /state` on the control port. Read-only."""

    phase: Phase
    seconds_since_progress: float
    uptime_seconds: float
    model: ModelIdentity
    plan_input: PlanInput
    ranks: tuple[RankState, ...]
    last_error: TerminationMessage | None = None
    engine_version: str

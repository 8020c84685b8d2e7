"""What the server process and a rank's worker say to each other over their socket. Torch-free, msgpack, no pickle.

A frame is a 4-byte big-endian length and a msgpack body of one tagged message. Frames above `FRAME_LIMIT_BYTES` are a
protocol error. The server sends `Configure` first, then `Submit`, `Abort`, `Stop`; the worker sends everything else.
Both ends are of one version; keys that an end does not know are ignored all the same.
"""

from __future__ import annotations

import msgspec

from hpu_engine.contract import BucketRun, CardHealth, FailureReason, GateResult, Phase, RecipeCache
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig

FRAME_LIMIT_BYTES = 64 * 1024 * 1024


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# --- server to worker


class Configure(_Message, frozen=True, kw_only=True):
    """The first message: everything the worker needs to load and warm up.

    `worker` of `rank`; `pod_workers` of all ranks share the pod's processors.
    """

    config: EngineConfig
    rank: int = 0
    worker: int = 0
    pod_workers: int = 1


class Submit(_Message, frozen=True, kw_only=True):
    """`shares_prompt_with` names an earlier request of the same prompt: this one waits for its blocks (`n` > 1).

    On the wire such a request may come without its prompt, behind the one that it shares it with: the worker's end of
    the socket fills it in.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    shares_prompt_with: str | None = None


class Abort(_Message, frozen=True, kw_only=True):
    """Forget these requests within one step; unknown ids are ignored (they may have just finished)."""

    request_ids: tuple[str, ...]


class Stop(_Message, frozen=True, kw_only=True):
    """Finish nothing, exit 0."""


# --- worker to server


class FromWorker(_Message, frozen=True, kw_only=True):
    """Said by every worker of a rank, and not only by the first one, which runs the steps."""

    worker: int = 0


class Progress(FromWorker, frozen=True, kw_only=True):
    """Start-up moved. `done` of `total` are bytes while fetching and loading, buckets while warming up.

    `planned_seconds` is the longest that `current` is planned to take; `ran` is the bucket before it.
    """

    phase: Phase
    done: int = 0
    total: int = 0
    current: str | None = None
    planned_seconds: float | None = None
    ran: BucketRun | None = None


class Loaded(FromWorker, frozen=True, kw_only=True):
    """Weights are in and the pool is allocated; limits a request is admitted against.

    `settled_digest` names everything that the workers of a group have to agree on.
    """

    max_model_len: int
    num_kv_blocks: int
    block_size: int
    max_batched_tokens: int
    architecture: str
    dtype: str
    kernels: str
    """What computes: `torch`, `compiled` (our own) or `tiles` (our own, on AMX)."""
    parameters: int
    settled_digest: str | None = None

    @property
    def most_tokens(self) -> int:
        """Of one request, prompt and output together: what the model allows and the pool holds."""
        return min(self.max_model_len, self.num_kv_blocks * self.block_size)

    def within(self, other: Loaded) -> Loaded:
        """What both can hold: the smaller limits. The digest is kept where it is the same."""
        return msgspec.structs.replace(
            self,
            max_model_len=min(self.max_model_len, other.max_model_len),
            num_kv_blocks=min(self.num_kv_blocks, other.num_kv_blocks),
            max_batched_tokens=min(self.max_batched_tokens, other.max_batched_tokens),
            settled_digest=self.settled_digest if self.settled_digest == other.settled_digest else None,
        )


class Ready(FromWorker, frozen=True, kw_only=True):
    """Every bucket ran and one real token was produced."""

    gate: GateResult | None = None


class Heartbeat(FromWorker, frozen=True, kw_only=True):
    """Sent after every step and at least once a second while idle, from the step loop's own thread."""

    steps: int
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    bucket: str | None = None
    first_seen_shapes: int = 0
    """Shapes that ran for the first time after warm-up."""
    card: CardHealth | None = None
    recipe_cache: RecipeCache | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The model's own log-probability of `token_id`, and of the most likely tokens (id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RowOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """New tokens of one request after one step. `finish` is None, `stop`, `length` or `abort`.

    `logprobs` has one entry per token where the request asked for them. `prompt_logprobs` are those of the next prompt
    tokens, the first of which has none: they come in order, over several steps, some of them without new tokens.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish: str | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class StepOutputs(_Message, frozen=True, kw_only=True):
    """`begun` are the requests that waited until this step."""

    rows: tuple[RowOutput, ...]
    step_seconds: float
    batched_tokens: int
    begun: tuple[str, ...] = ()


class Rejected(_Message, frozen=True, kw_only=True):
    """A request that can never run, or whose own handling failed. The others go on."""

    request_id: str
    message: str
    param: str | None = None
    internal: bool = False


class Fatal(FromWorker, frozen=True, kw_only=True):
    """The worker's last words before it exits."""

    reason: FailureReason
    message: str
    path: str | None = None
    tensor: str | None = None
    bucket: str | None = None


ToWorker = Configure | Submit | Abort | Stop
ToServer = Progress | Loaded | Ready | Heartbeat | StepOutputs | Rejected | Fatal

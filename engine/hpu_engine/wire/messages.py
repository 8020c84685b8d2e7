"""What the server process and a rank's worker say to each other over their socket. Torch-free, msgpack, no pickle.

A frame is a 4-byte big-endian length and a msgpack body of one tagged message. Frames above `FRAME_LIMIT_BYTES` are a
protocol error. The server sends `Configure` first, then `Submit`, `Abort`, `Stop`; the worker sends everything else.
"""

from __future__ import annotations

import msgspec

from hpu_engine.contract import FailureReason, Phase
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig

FRAME_LIMIT_BYTES = 64 * 1024 * 1024


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# --- server to worker


class Configure(_Message, frozen=True, kw_only=True):
    """The first message: everything the worker needs to load and warm up."""

    config: EngineConfig
    rank: int = 0
    worker: int = 0


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


class Progress(_Message, frozen=True, kw_only=True):
    """Start-up moved. `done` of `total` are bytes while loading, buckets while warming up."""

    phase: Phase
    done: int = 0
    total: int = 0
    current: str | None = None


class Loaded(_Message, frozen=True, kw_only=True):
    """Weights are in and the pool is allocated; limits a request is admitted against."""

    max_model_len: int
    num_kv_blocks: int
    block_size: int
    max_batched_tokens: int
    architecture: str
    dtype: str
    kernels: str
    """What computes: `torch`, `compiled` (our own) or `tiles` (our own, on AMX)."""
    parameters: int

    @property
    def most_tokens(self) -> int:
        """Of one request, prompt and output together: what the model allows and the pool holds."""
        return min(self.max_model_len, self.num_kv_blocks * self.block_size)


class Ready(_Message, frozen=True, kw_only=True):
    """Every bucket ran and one real token was produced."""


class Heartbeat(_Message, frozen=True, kw_only=True):
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


class Fatal(_Message, frozen=True, kw_only=True):
    """The worker's last words before it exits."""

    reason: FailureReason
    message: str
    path: str | None = None
    tensor: str | None = None
    bucket: str | None = None


ToWorker = Configure | Submit | Abort | Stop
ToServer = Progress | Loaded | Ready | Heartbeat | StepOutputs | Rejected | Fatal

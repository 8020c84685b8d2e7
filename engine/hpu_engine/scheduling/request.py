"""One request inside a rank: its tokens, how many of them are in the KV cache, and which blocks hold them. Torch-free.

Three integers say where a request is: `num_computed <= num_tokens <= token_limit`. Computed tokens catch up with
tokens; when they have, the model's answer for the last one is sampled and becomes the next token. Prompt, chunks,
prefix hits, preemption and decoding are all that one rule. The scheduler is the only writer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.token_counts import TokenCounts


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` is the prompt followed by the output; `token_limit` bounds its length (set at admission)."""

    request_id: str
    tokens: list[int]
    params: SamplingParams
    seed: int
    shares_prompt_with: str | None = None
    """An earlier request of the same prompt; once that has computed it, its full blocks are shared."""
    prompt_len: int = field(init=False)
    token_limit: int = field(init=False)
    status: Status = field(init=False, default=Status.WAITING)
    num_computed: int = field(init=False, default=0)
    blocks: list[int] = field(init=False, default_factory=list)
    digests: list[bytes] = field(init=False, default_factory=list)
    """Chained digests of the leading full blocks of `tokens`, as far as they were needed yet."""
    num_registered: int = field(init=False, default=0)
    """How many leading blocks the prefix cache was told about."""
    has_run: bool = field(init=False, default=False)
    """Whether a step has worked on it."""
    num_scored: int = field(init=False, default=0)
    """For how many leading prompt tokens `prompt_logprobs` of the next one were reported."""
    counts: TokenCounts = field(init=False, default_factory=TokenCounts)
    """Of `tokens`, as far as they were needed yet; a preemption loses none."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        self.token_limit = self.prompt_len + self.params.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def num_missing(self) -> int:
        """Tokens still to be computed before the next one can be sampled; at least 1 while unfinished."""
        return len(self.tokens) - self.num_computed

    @property
    def num_to_score(self) -> int:
        """Leading tokens whose answers are wanted because the prompt is to be scored."""
        return self.prompt_len - 1 if self.params.prompt_logprobs is not None else 0

    def finish_reason(self) -> str | None:
        """What the newest output token means: `stop`, `length`, or None to go on."""
        enough = self.num_output >= max(1, self.params.min_tokens)
        if enough and self.tokens[-1] in self.params.stop_token_ids:
            return "stop"
        return "length" if self.num_tokens >= self.token_limit else None

"""How one request wants its tokens chosen. Torch-free: the server fills it, the worker's sampler obeys it.

Values are checked where a request enters (`hpu_engine.server`, `LLM`); the worker trusts them. Stop strings are not
here: they are text, and text belongs to the server.
"""

from __future__ import annotations

import math

import msgspec

MOST_LOGPROBS = 20
LEAST_REPETITION_PENALTY = 0.001
MOST_REPETITION_PENALTY = 1000.0
"""Beyond these a logit times or over the penalty could overflow."""
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """`temperature` 0 (or below 1e-5) is greedy. `max_tokens` counts output tokens. `seed` None: drawn per request.

    `top_k` 0, `top_p` 1.0 and `min_p` 0.0 switch their filter off; tokens as likely as the last one that stays stay.
    `min_p` is relative to the most likely token. Penalties are off at 1.0 (repetition) and 0.0. `logit_bias` is added
    to the logits of these ids. `logprobs` and `prompt_logprobs`: also report the log-probability of each output token,
    of each prompt token but the first, and of so many likely ones beside it.
    Stop tokens cannot be chosen before `min_tokens` output tokens. `stop_token_ids` end a request like the model's own
    end-of-sequence ids (which the server puts in here unless `ignore_eos`), and are not part of the text.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """Whether logits are adjusted before a token is chosen."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )


class InvalidParameter(ValueError):
    """A sampling parameter out of its range; `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        self.param = param
        super().__init__(f"{param}: {message}")


def check_sampling_params(params: SamplingParams, *, vocab: int) -> None:
    """Raises InvalidParameter for the first field the sampler could not obey."""
    limits: dict[str, tuple[bool, str]] = {
        "max_tokens": (params.max_tokens >= 1, "at least 1"),
        "temperature": (0.0 <= params.temperature < math.inf, "a finite number, at least 0"),
        "top_p": (0.0 < params.top_p <= 1.0, "above 0 and at most 1"),
        "top_k": (params.top_k >= 0, "at least 0"),
        "min_p": (0.0 <= params.min_p <= 1.0, "a number between 0 and 1"),
        "repetition_penalty": (
            LEAST_REPETITION_PENALTY <= params.repetition_penalty <= MOST_REPETITION_PENALTY,
            f"a number between {LEAST_REPETITION_PENALTY} and {MOST_REPETITION_PENALTY:g}",
        ),
        "presence_penalty": (abs(params.presence_penalty) <= 2.0, "a number between -2 and 2"),
        "frequency_penalty": (abs(params.frequency_penalty) <= 2.0, "a number between -2 and 2"),
        "logit_bias": (
            all(0 <= token < vocab and abs(bias) <= 100.0 for token, bias in params.logit_bias.items()),
            f"ids below {vocab} with numbers between -100 and 100",
        ),
        "min_tokens": (0 <= params.min_tokens <= params.max_tokens, "at least 0 and at most max_tokens"),
        "logprobs": (_is_count(params.logprobs), f"a number between 0 and {MOST_LOGPROBS}"),
        "prompt_logprobs": (_is_count(params.prompt_logprobs), f"a number between 0 and {MOST_LOGPROBS}"),
        "seed": (params.seed is None or abs(params.seed) < 1 << 63, "a whole number of at most 63 bits"),
        "stop_token_ids": (all(0 <= token < vocab for token in params.stop_token_ids), f"ids below {vocab}"),
    }
    for name, (holds, wanted) in limits.items():
        if not holds:
            raise InvalidParameter(name, f"{wanted} is needed, found {getattr(params, name)!r}")


def _is_count(logprobs: int | None) -> bool:
    return logprobs is None or 0 <= logprobs <= MOST_LOGPROBS

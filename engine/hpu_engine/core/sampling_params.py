"""How one request wants its tokens chosen. Torch-free: the server fills it, the worker's sampler obeys it.

Values are checked where a request enters (`hpu_engine.server`, `LLM`); the worker trusts them. Stop strings are not
here: they are text, and text belongs to the server.
"""

from __future__ import annotations

import math

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """`temperature` 0 (or below 1e-5) is greedy. `max_tokens` counts output tokens. `seed` None: drawn per request.

    `top_k` 0 and `top_p` 1.0 switch their filter off. `stop_token_ids` end a request like the model's own
    end-of-sequence ids (which the server puts in here unless `ignore_eos`), and are not part of the text.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""


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
        "seed": (params.seed is None or abs(params.seed) < 1 << 63, "a whole number of at most 63 bits"),
        "stop_token_ids": (all(0 <= token < vocab for token in params.stop_token_ids), f"ids below {vocab}"),
    }
    for name, (holds, wanted) in limits.items():
        if not holds:
            raise InvalidParameter(name, f"{wanted} is needed, found {getattr(params, name)!r}")

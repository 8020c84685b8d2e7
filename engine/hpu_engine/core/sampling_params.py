"""How one request wants its tokens chosen. Torch-free: the server fills it, the worker's sampler obeys it.

Values are checked where a request enters (`hpu_engine.server`, `LLM`); the worker trusts them. Stop strings are not
here: they are text, and text belongs to the server.
"""

from __future__ import annotations

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

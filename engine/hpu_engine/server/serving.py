"""What the generating routes stand on, and their common way from a checked request to sequences of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hpu_engine.core.messages import Loaded
from hpu_engine.core.sampling_params import SamplingParams
from hpu_engine.planning.model import ModelDescription
from hpu_engine.server.engine import Engine, Job
from hpu_engine.server.errors import BODY_ENCODINGS, ApiError, bad_request, damaged_body, not_serving, unknown_model
from hpu_engine.server.pod import Pod
from hpu_engine.server.protocol import ChatCompletionRequest, CompletionRequest
from hpu_engine.server.tokenizer import Tokenizer

BODY_LIMIT_BYTES = 16 * 1024 * 1024
BODY_SECONDS = 60.0
RETRY_WHILE_STARTING_SECONDS = 5


@dataclass(frozen=True)
class LoadedModel:
    """What the server itself read of the checkpoint."""

    description: ModelDescription
    tokenizer: Tokenizer


class Serving:
    """The pod, its engine and its model under one name. `accepts_requests` is false in the last part of a drain."""

    def __init__(self, pod: Pod, engine: Engine, name: str, created: int) -> None:
        self.pod = pod
        self.engine = engine
        self.name = name
        self.created = created
        self.accepts_requests = True
        self._model: LoadedModel | None = None

    def has_loaded(self, model: LoadedModel) -> None:
        self._model = model

    def model(self) -> LoadedModel:
        """For a request that arrives now. Raises `ApiError` 503 when it could not be answered."""
        if not self.accepts_requests:
            raise not_serving("the server is shutting down")
        objection = self.pod.why_not_alive()
        ranks_ready = all(rank.is_serving for rank in self.pod.ranks)
        if objection is None and self._model is not None and ranks_ready:
            return self._model
        raise not_serving(objection or self.pod.why_not_ready() or "not ready", RETRY_WHILE_STARTING_SECONDS)

    def check_model_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise unknown_model(name, self.name)


SERVING: web.AppKey[Serving] = web.AppKey("serving", Serving)


async def read_body(request: web.Request) -> bytes:
    """Bounded in size and time; decompressed. Raises `ApiError`, also for every fault in how the body is coded."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in BODY_ENCODINGS:
        raise damaged_body(encoding[:100])
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise bad_request("body", f"the body is larger than {BODY_LIMIT_BYTES} bytes") from None
    except (HttpProcessingError, web.RequestPayloadError):
        raise damaged_body(encoding) from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s", param="body") from None


async def encode_prompt(
    text: str, tokenizer: Tokenizer, limits: Loaded, *, param: str, add_special_tokens: bool
) -> tuple[int, ...]:
    """Token ids of a prompt. One that cannot fit by its length alone is refused before it costs any tokenizing."""
    if len(text) > limits.max_model_len * tokenizer.chars_per_token:
        raise prompt_too_long(
            param, f"{len(text)} characters, which no {limits.max_model_len} tokens stand for", limits
        )
    token_ids = await tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise bad_request(param, f"{param} has no tokens")
    return token_ids


def output_limit(
    prompt_tokens: int, wanted: int | None, default: int | None, limits: Loaded, *, param: str = "prompt"
) -> int:
    """How many tokens may be generated: what was asked for, never past the end of the context.

    With neither `wanted` nor `default` it is all the room there is. Raises `ApiError` 400 when there is none, or when
    more is wanted than the whole context has.
    """
    if prompt_tokens >= limits.max_model_len:
        raise prompt_too_long(param, f"{prompt_tokens} tokens", limits)
    if wanted is not None and wanted > limits.max_model_len:
        raise bad_request(
            "max_tokens", f"max_tokens is {wanted}; prompt and output together are limited to {limits.max_model_len}"
        )
    room = limits.max_model_len - prompt_tokens
    if wanted is None and default is None:
        # A KV slot a token: more than the pool holds would be refused, though nobody asked for that much.
        return max(1, min(room, limits.num_kv_blocks * limits.block_size - prompt_tokens))
    return min(room, wanted or default or room)


def prompt_too_long(param: str, size: str, limits: Loaded) -> ApiError:
    return bad_request(
        param,
        f"the prompt has {size}; prompt and output together are limited to {limits.max_model_len} tokens",
        code="context_length_exceeded",
    )


def make_jobs(
    prompts: Sequence[tuple[int, ...]],
    request: CompletionRequest | ChatCompletionRequest,
    limits: Sequence[int],
    model: LoadedModel,
) -> list[Job]:
    """One job a prompt; `limits` are their output tokens. Raises `ApiError` for a stop id outside the vocabulary."""
    vocab = model.description.vocab
    for token_id in request.stop_token_ids:
        if token_id >= vocab:
            raise bad_request("stop_token_ids", f"stop_token_ids has {token_id}; the vocabulary ends at {vocab - 1}")
    own = () if request.ignore_eos else model.description.eos_token_ids
    decode = model.tokenizer.decoder(skip_special_tokens=request.skip_special_tokens)
    return [
        Job(
            prompt=prompt,
            params=SamplingParams(
                max_tokens=limit,
                temperature=1.0 if request.temperature is None else request.temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                top_k=max(0, request.top_k or 0),
                seed=request.seed,
                stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *own))),
                ignore_eos=request.ignore_eos,
                cache_salt=request.cache_salt,
            ),
            stops=request.stop,
            decode=decode,
            shown_stop_ids=frozenset(request.stop_token_ids),
        )
        for prompt, limit in zip(prompts, limits, strict=True)
    ]


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    headers: dict[str, Any] = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(error.retry_after_seconds)
    return json_response(error.encode(), error.status, headers)

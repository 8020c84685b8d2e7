"""What the routes stand on: the pod, its admission and its model; bodies in and bodies out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hpu_engine.server.api.unpacking import unpack
from hpu_engine.server.errors import (
    BODY_ENCODINGS,
    ApiError,
    body_too_large,
    damaged_body,
    not_serving,
    unknown_model,
)
from hpu_engine.server.model_files import LoadedModel
from hpu_engine.server.pod.pod import Pod
from hpu_engine.server.requests.admission import Admission

BODY_LIMIT_BYTES = 16 * 1024 * 1024
BODY_SECONDS = 60.0
INLINE_BODY_BYTES = 2048
"""What is longer is read, rendered and tokenized in a thread: all streams and probes share the event loop."""
RETRY_WHILE_STARTING_SECONDS = 5

P = ParamSpec("P")
T = TypeVar("T")


class ServingModel:
    """The pod, its admission and its model under one name. `accepts_requests` is false in the last part of a drain."""

    def __init__(self, pod: Pod, admission: Admission, name: str, created: int) -> None:
        self.pod = pod
        self.admission = admission
        self.name = name
        self.created = created
        self.accepts_requests = True
        self.last_request_at = 0.0
        """By the monotonic clock."""
        self._model: LoadedModel | None = None

    def has_loaded(self, model: LoadedModel) -> None:
        self._model = model

    def model(self) -> LoadedModel:
        """For a request that arrives now. Raises `ApiError` 503 when it could not be answered."""
        if not self.accepts_requests:
            raise not_serving("the server is shutting down")
        self.last_request_at = time.monotonic()
        objection = self.pod.why_not_alive() or self.pod.peers.loss
        ranks_ready = all(rank.is_serving for rank in self.pod.ranks)
        if objection is None and self._model is not None and ranks_ready:
            return self._model
        raise not_serving(objection or self.pod.why_not_ready() or "not ready", RETRY_WHILE_STARTING_SECONDS)

    def check_model_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise unknown_model(name, self.name)


SERVING: web.AppKey[ServingModel] = web.AppKey("serving", ServingModel)


async def read_body(request: web.Request) -> bytes:
    """Bounded in size and time; decompressed. Raises `ApiError`, also for every fault in how the body is coded."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in BODY_ENCODINGS:
        raise damaged_body(encoding[:100])
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise body_too_large(BODY_LIMIT_BYTES) from None
    except (HttpProcessingError, web.RequestPayloadError):
        raise damaged_body(encoding) from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s", param="body") from None
    return data if encoding == "identity" else await asyncio.to_thread(unpack, data, encoding, BODY_LIMIT_BYTES)


async def prepare(body: bytes | str, work: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T:
    """The result of `work`, which costs as much as `body` is long: in a thread when that could be felt elsewhere."""
    if len(body) <= INLINE_BODY_BYTES:
        return work(*args, **kw)
    return await asyncio.to_thread(work, *args, **kw)


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    headers: dict[str, Any] = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(error.retry_after_seconds)
    return json_response(error.encode(), error.status, headers)

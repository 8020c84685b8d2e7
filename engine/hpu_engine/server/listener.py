"""How an application is put on a port, so that what is no HTTP at all is also answered in OpenAI's error form.

aiohttp answers what its parser refuses before any application sees it, in plain text and with its version; here that
answer is an error object, says nothing of the software, and costs no stack trace in the log.
"""

from __future__ import annotations

from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong, PayloadEncodingError

from hpu_engine.server.errors import ApiError

log = structlog.get_logger()

LINE_LIMIT_BYTES = 8190
SHOWN_CHARS = 200


class Runner(web.AppRunner):
    """An `AppRunner` whose connections answer like `_Connection`."""

    def __init__(self, app: web.Application) -> None:
        super().__init__(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,  # it would unpack what nobody reads any more, without end: `read_body` does it
            shutdown_timeout=2.0,
            max_line_size=LINE_LIMIT_BYTES,
            max_field_size=LINE_LIMIT_BYTES,
        )
        app.on_response_prepare.append(_without_banner)

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """aiohttp queues an answer to chunks that are none behind the request that waits for them, which would wait on
        until its time is up. So whoever still reads a body is told.
        """
        super().data_received(data)
        error = getattr(self._messages[-1][0], "exc", None) if self._messages else None
        if not isinstance(error, HttpProcessingError):
            return
        current = [] if self._current_request is None else [self._current_request.content]
        for body in (*current, *(payload for _, payload in self._messages)):
            if not body.is_eof() and body.exception() is None:
                body.set_exception(error)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A damaged body that was answered already is met again when the rest of it is skipped."""
        if not isinstance(kw.get("exc_info"), (HttpProcessingError, web.RequestPayloadError)):
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what no application has seen, or has failed on. The connection ends with it."""
        if status >= 500:
            log.error("a request failed in the server", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is sent; the error can only end it")
        error = (
            _in_words(exc, message, status) if status < 500 else ApiError(status, "the server failed on this request")
        )
        answer = _WithoutBanner(body=error.encode(), status=status, content_type="application/json")
        answer.force_close()
        return answer


async def _without_banner(request: web.Request, response: web.StreamResponse) -> None:
    """Which software in which version answers is nobody's business."""
    response.headers.pop("Server", None)


class _WithoutBanner(web.Response):
    """For what has no application, whose signal does it otherwise."""

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.pop("Server", None)


def _in_words(error: BaseException | None, message: str | None, status: int) -> ApiError:
    """Bounded, and without the bytes of a long header: they may be a secret."""
    if isinstance(error, LineTooLong):
        return ApiError(status, f"the first line or a header of the request is longer than {LINE_LIMIT_BYTES} bytes")
    text = message or (error.message if isinstance(error, HttpProcessingError) else "") or "its head cannot be read"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = " ".join(lines[:2])[:SHOWN_CHARS]
    param = "body" if isinstance(error, PayloadEncodingError) else None
    return ApiError(status, f"the request is not valid HTTP: {shown}", param=param)

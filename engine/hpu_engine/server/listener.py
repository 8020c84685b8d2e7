"""How an application is put on a port: which connections are kept, and what is answered to what is no HTTP at all.

A connection without a request is closed in time, and so is one whose client does not read its answer. There are only so
many: the API and the control port live in one process, and share its descriptors. The API turns away the next one; the
control port, which probes must reach, closes the oldest idle one instead.

aiohttp answers what its parser refuses before any application sees it, in plain text and with its version; here that
answer is an error object, says nothing of the software, and costs no stack trace in the log.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import sys
from typing import Any, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong, PayloadEncodingError

from hpu_engine.server.errors import ApiError

log = structlog.get_logger()

LINE_LIMIT_BYTES = 8190
SHOWN_CHARS = 200
HEAD_SECONDS = 30.0
"""From the first byte of a request's head to its last; for the first request from the connection on."""
KEEP_ALIVE_SECONDS = 620.0
"""Between two requests: longer than load balancers keep theirs, which must not send into one that is closed here."""
_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
ALL_ADDRESSES = ("::", "")
"""As a host: every address of the machine, of both families."""
BACKLOG = 128
"""Connections that are accepted in one go, before they are counted."""
UNCOUNTED = 3 * BACKLOG
"""While some are counted or turned away, the next are accepted already."""
UNREAD_SECONDS = 60.0
"""How long a client may take nothing of an answer that waits for it; then its request is given up."""
CONTROL_CONNECTIONS = 32
CONTROL_BACKLOG = 32
OTHER_DESCRIPTORS = 64 + CONTROL_CONNECTIONS + CONTROL_BACKLOG
"""For files, the worker, the template process, and the control port."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets, all on one port. For all addresses it is one for both families, or IPv4's where the machine
    has no IPv6; a name gets one for each of its addresses.

    Raises OSError: the port is taken, or the host is none of this machine's.
    """
    if host in ALL_ADDRESSES:
        if (both := _bind_all(port)) is not None:
            return [both]
        host = "0.0.0.0"  # noqa: S104 - asked for
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            bound = sockets[0].getsockname()[1] if sockets else port
            whole = (address[0], bound, *address[2:])
            sockets.append(socket.create_server(cast(tuple[str, int], whole), family=family, backlog=BACKLOG))
    except OSError as error:
        if not sockets or error.errno not in _NO_SUCH_FAMILY:
            for opened in sockets:
                opened.close()
            raise
    return sockets


def _bind_all(port: int) -> socket.socket | None:
    if not socket.has_dualstack_ipv6():
        return None
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    except OSError as error:
        if error.errno not in _NO_SUCH_FAMILY:
            raise
        return None


def most_connections() -> int:
    """How many connections the API may have, for this process's limit of descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(limit // 4, limit - UNCOUNTED - OTHER_DESCRIPTORS)


class Runner(web.AppRunner):
    """An `AppRunner` whose connections are `_Connection`s, at most `most_connections` of them.

    `keeps_newest`: where there is one too many, the oldest idle one is closed.
    """

    def __init__(
        self, app: web.Application, most_connections: int = sys.maxsize, *, keeps_newest: bool = False
    ) -> None:
        super().__init__(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,  # it would unpack what nobody reads any more, without end: `read_body` does it
            shutdown_timeout=2.0,
            max_line_size=LINE_LIMIT_BYTES,
            max_field_size=LINE_LIMIT_BYTES,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
        )
        self._most_connections = most_connections
        self._keeps_newest = keeps_newest
        app.on_response_prepare.append(_without_banner)

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(
            self._most_connections,
            self._keeps_newest,
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )


class _Server(web.Server):
    def __init__(self, most_connections: int, keeps_newest: bool, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._most_connections = most_connections
        self._keeps_newest = keeps_newest

    def has_room(self) -> bool:
        """For one more connection; made, where the newest is kept."""
        if len(self._connections) < self._most_connections:
            return True
        if not self._keeps_newest:
            return False
        staying = [(one, transport) for one, transport in self._connections.items() if not transport.is_closing()]
        idle = [transport for one, transport in staying if cast(_Connection, one).is_idle]
        for transport in (idle or [transport for _, transport in staying])[:1]:
            transport.abort()
        return True

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ("_head_timer", "_unread_timer")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        stream = cast(asyncio.Transport, transport)
        if not cast(_Server, self._manager).has_room():
            _turn_away(stream)
            return
        stream.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of every byte that is not taken
        super().connection_made(transport)
        self._head_timer = self._loop.call_later(HEAD_SECONDS, self.force_close)

    def connection_lost(self, error: BaseException | None) -> None:
        self._stop_head_timer()
        self._stop_unread_timer()
        super().connection_lost(error)

    @property
    def is_idle(self) -> bool:
        return self._current_request is None

    # --- a client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._stop_unread_timer()
        super().resume_writing()

    def _await_reader(self) -> None:
        self._unread_timer = self._loop.call_later(UNREAD_SECONDS, self._check_reader, self._taken())

    def _check_reader(self, taken: tuple[int, int]) -> None:
        if self._taken() != taken:
            self._await_reader()
        elif self.transport is not None:
            self.transport.abort()

    def _taken(self) -> tuple[int, int]:
        """A number that moves while the client takes what was written: of the present answer, or of what is left."""
        unsent = 0 if self.transport is None else self.transport.get_write_buffer_size()
        if self._current_request is None:
            return 0, -unsent
        return id(self._current_request), self._current_request.writer.output_size - unsent

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    # --- a client that does not ask

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._waiter is None or self._waiter.done():
            self._stop_head_timer()  # a head is complete
        elif self._head_timer is None:
            self._head_timer = self._loop.call_later(HEAD_SECONDS, self.force_close)
        self._tell_readers()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _tell_readers(self) -> None:
        """aiohttp queues an answer to chunks that are none behind the request that waits for them, which would wait on
        until its time is up. So whoever still reads a body is told.
        """
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


def _turn_away(transport: asyncio.Transport) -> None:
    """Before any request is read: its head may never come."""
    error = ApiError(503, "too many connections are open", code="overloaded", retry_after_seconds=1)
    body = error.encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {error.retry_after_seconds}\r\nConnection: close\r\n\r\n"
    )
    transport.write(head.encode() + body)
    transport.close()


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

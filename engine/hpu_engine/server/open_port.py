"""One of the server's two ports, opened as the settings say; a port that cannot be had is named with its flag."""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack

from aiohttp import web

from hpu_engine.contract import FailureReason, TerminationMessage
from hpu_engine.server.listener import (
    BACKLOG,
    CONTROL_BACKLOG,
    CONTROL_CONNECTIONS,
    Runner,
    bind,
    most_connections,
)
from hpu_engine.server.pod.termination import Failed
from hpu_engine.settings.serve import ServeSettings, flag_of


async def open_port(closing: AsyncExitStack, app: web.Application, settings: ServeSettings, field: str) -> str:
    """Serve `app` on the port in the setting `field`; returns the address. Raises `Failed` that names flag and port."""
    port: int = getattr(settings, field)
    is_control = field == "control_port"
    most, backlog = (CONTROL_CONNECTIONS, CONTROL_BACKLOG) if is_control else (most_connections(), BACKLOG)
    runner = Runner(app, most, keeps_newest=is_control)
    await runner.setup()
    closing.push_async_callback(runner.cleanup)
    try:
        for listening in bind(settings.host, port):
            await web.SockSite(runner, listening, backlog=backlog).start()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = FailureReason.PORT_TAKEN if taken else FailureReason.USAGE
        what = "is taken by another process; choose a free one" if taken else f"cannot be used: {error.strerror}"
        message = f"{flag_of(field)} {port} on {settings.host} {what}"
        raise Failed(TerminationMessage(reason=reason, message=message)) from None
    host, bound = runner.addresses[0][:2]
    return f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"

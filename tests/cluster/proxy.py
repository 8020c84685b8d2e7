"""A slow way to the API server: a TCP proxy in a thread, with a delay per direction that a test sets while it runs.

TLS goes through it untouched, so the certificate must name the loopback address, which ours does.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 64 * 1024
# What may be on its way in one direction of one connection; beyond it the sender is held back.
_IN_FLIGHT_CHUNKS = 64


class ApiLatency:
    """A proxy before an API server. `kubeconfig` is a copy of the given one that goes through it."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        host, _, port = config["clusters"][0]["cluster"]["server"].removeprefix("https://").partition(":")
        self._target = (host, int(port))
        self._delay_seconds = 0.0
        self._open = True
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api-latency", daemon=True)
        self._thread.start()
        self._server: asyncio.Server = self._await(asyncio.start_server(self._accepted, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        config["clusters"][0]["cluster"]["server"] = self.url
        self.kubeconfig = folder / f"latency-{self.port}.kubeconfig"
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(json.dumps(config))

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def set_delay(self, seconds: float) -> None:
        """Delay every byte by this long in each direction, from now on; a round trip takes twice as long."""
        self._delay_seconds = seconds

    def cut(self) -> None:
        """Break every connection and refuse new ones, as an API server that is gone."""
        self._open = False
        self._await(self._drop())

    def restore(self) -> None:
        """Accept connections again."""
        self._open = True

    def close(self) -> None:
        self._open = False
        self._await(self._drop())
        self._server.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()
        self.kubeconfig.unlink(missing_ok=True)

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    async def _drop(self) -> None:
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        ends = [writer]
        try:
            if self._open:
                far_reader, far = await asyncio.open_connection(*self._target)
                ends.append(far)
                async with asyncio.TaskGroup() as copies:
                    copies.create_task(self._copy(reader, far))
                    copies.create_task(self._copy(far_reader, writer))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # one side has gone, or the test cut it: so does the other, below
        finally:
            for end in ends:
                end.transport.abort()
            self._connections.discard(connection)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass chunks on when their time has come; order and bandwidth stay, only time passes."""
        pending: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_FLIGHT_CHUNKS)

        async def read() -> None:
            chunk = b"?"
            while chunk:
                chunk = await reader.read(_CHUNK_BYTES)
                await pending.put((self._loop.time() + self._delay_seconds, chunk))

        async def write() -> None:
            while True:
                due, chunk = await pending.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                if not chunk:
                    break
                writer.write(chunk)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

        async with asyncio.TaskGroup() as halves:
            halves.create_task(read())
            halves.create_task(write())

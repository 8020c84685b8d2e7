"""A TCP relay: listens on the host's loopback, connects inside a network namespace. No link, route or rule is needed.

`python -m tests.cluster.relay LISTEN_PORT TARGET_HOST TARGET_PORT NAMESPACE`. A socket belongs to the namespace that it
was made in: the listening one is made on the host, then the process enters the namespace and makes the others there.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import sys
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_CHUNK_BYTES = 256 * 1024


def enter_network(namespace: Path) -> None:
    """Move this (single) thread into a network namespace; OSError when the kernel refuses."""
    handle = os.open(namespace, os.O_RDONLY)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(handle, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(namespace))
    finally:
        os.close(handle)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction until its end, then pass the end on."""
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()


async def join(
    near: tuple[asyncio.StreamReader, asyncio.StreamWriter], far: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Copy both directions until both have ended, then close both."""
    try:
        await asyncio.gather(pump(near[0], far[1]), pump(far[0], near[1]))
    finally:
        near[1].close()
        far[1].close()


async def serve(listening: socket.socket, host: str, port: int) -> None:
    """Relay every connection; one that cannot be made on is closed, as a server that is down would do."""

    # A task whose client has sent all is referred to by nobody but itself: it would be collected before the answer.
    at_work: set[asyncio.Task[None] | None] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        at_work.add(task)
        try:
            far = await asyncio.open_connection(host, port)
            await join((reader, writer), far)
        except OSError:
            writer.transport.abort()
        finally:
            at_work.discard(task)

    server = await asyncio.start_server(accepted, sock=listening)
    async with server:
        await server.serve_forever()


def main(arguments: list[str]) -> None:
    listen_port, host, port, namespace = int(arguments[0]), arguments[1], int(arguments[2]), Path(arguments[3])
    listening = socket.create_server(("127.0.0.1", listen_port), backlog=256)
    enter_network(namespace)
    asyncio.run(serve(listening, host, port))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Frames on the socket between the server process and a worker: 4-byte big-endian length, msgpack body. Torch-free.

Both ends hold the two bounds of the protocol: a frame is at most `FRAME_LIMIT_BYTES`, and only a message of the
expected direction decodes. Whatever breaks them raises `WireError`; the other end closing between two frames is the
end of the conversation (`None`), inside a frame it is an error.
"""

from __future__ import annotations

import asyncio
import socket
import threading

import msgspec

from hpu_engine.wire.messages import FRAME_LIMIT_BYTES, Submit, ToServer, ToWorker

HEADER_BYTES = 4
RECEIVE_BYTES = 256 * 1024

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)


class WireError(Exception):
    """The bytes on the socket are not this protocol."""


def encode_frame(message: ToWorker | ToServer) -> bytes:
    """The frame of one message. Raises `WireError` when it would exceed the limit."""
    body = _encoder.encode(message)
    if len(body) > FRAME_LIMIT_BYTES:
        raise WireError(
            f"{type(message).__name__} takes {len(body)} bytes; a frame carries at most {FRAME_LIMIT_BYTES}"
        )
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def decode_to_worker(body: bytes | bytearray | memoryview) -> ToWorker:
    """A message from the server. Raises `WireError`."""
    try:
        return _to_worker.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message for a worker: {error}") from error


def decode_to_server(body: bytes | bytearray | memoryview) -> ToServer:
    """A message from a worker. Raises `WireError`."""
    try:
        return _to_server.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message for the server: {error}") from error


def _body_bytes(header: bytes | bytearray | memoryview) -> int:
    size = int.from_bytes(header, "big")
    if size > FRAME_LIMIT_BYTES:
        raise WireError(f"a frame of {size} bytes was announced; the limit is {FRAME_LIMIT_BYTES}")
    return size


class ServerConnection:
    """The server's end, on the event loop. Sends may come from any task of that loop; one task receives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> ServerConnection:
        """Takes over one end of a connected stream socket."""
        sock.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=sock, limit=RECEIVE_BYTES))

    def send(self, message: ToWorker) -> None:
        """Queue a frame without waiting. Raises `ConnectionError` (socket closed), `WireError` (too large)."""
        if self._writer.is_closing():
            raise ConnectionResetError("the worker's socket is closed")
        self._writer.write(encode_frame(message))

    async def receive(self) -> ToServer | None:
        """The next message, None at the end. Raises `WireError`, `ConnectionError`."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return None
            raise WireError("the socket closed inside a frame's header") from error
        try:
            return decode_to_server(await self._reader.readexactly(_body_bytes(header)))
        except asyncio.IncompleteReadError as error:
            raise WireError("the socket closed inside a frame") from error

    def close(self) -> None:
        self._writer.close()


class WorkerConnection:
    """The worker's end, blocking. Sends may come from several threads; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._send_lock = threading.Lock()
        self._received = bytearray()
        self._with_prompt: Submit | None = None
        """The last request that came with its prompt."""

    @classmethod
    def inherit(cls, descriptor: int) -> WorkerConnection:
        """The end that the server passed down as a file descriptor."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """For `selectors`: readable means that `receive` or `receive_pending` has something."""
        return self._sock.fileno()

    def send(self, message: ToServer) -> None:
        """Blocks until the kernel took the frame. Raises `OSError` (server gone), `WireError` (too large)."""
        frame = encode_frame(message)
        with self._send_lock:
            self._sock.sendall(frame)

    def receive(self) -> ToWorker | None:
        """Blocks for the next message; None when the server closed its end. Raises `WireError`, `OSError`."""
        while (message := self._take()) is None:
            if not self._fill(0):
                self._check_ended_between_frames()
                return None
        return message

    def receive_pending(self) -> tuple[list[ToWorker], bool]:
        """Every message that is here now, without waiting, and whether the server's end is still open."""
        messages: list[ToWorker] = []
        is_open = True
        try:
            while is_open:
                is_open = self._fill(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        while (message := self._take()) is not None:
            messages.append(message)
        if not is_open:
            self._check_ended_between_frames()
        return messages, is_open

    def close(self) -> None:
        self._sock.close()

    def _fill(self, flags: int) -> bool:
        try:
            chunk = self._sock.recv(RECEIVE_BYTES, flags)
        except ConnectionResetError:
            chunk = b""
        self._received += chunk
        return bool(chunk)

    def _check_ended_between_frames(self) -> None:
        if self._received:
            raise WireError("the socket closed inside a frame")

    def _take(self) -> ToWorker | None:
        if len(self._received) < HEADER_BYTES:
            return None
        end = HEADER_BYTES + _body_bytes(self._received[:HEADER_BYTES])
        if len(self._received) < end:
            return None
        message = decode_to_worker(bytes(self._received[HEADER_BYTES:end]))
        del self._received[:end]
        return self._whole(message) if isinstance(message, Submit) else message

    def _whole(self, submit: Submit) -> Submit:
        """With the prompt of the request that it shares it with, where it came without one."""
        if submit.prompt_token_ids or submit.shares_prompt_with is None:
            self._with_prompt = submit
            return submit
        if self._with_prompt is None or self._with_prompt.request_id != submit.shares_prompt_with:
            raise WireError("a request without a prompt does not stand behind the one that it shares it with")
        return msgspec.structs.replace(submit, prompt_token_ids=self._with_prompt.prompt_token_ids)

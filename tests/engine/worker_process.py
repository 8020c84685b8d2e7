"""A real worker process on a socket pair, driven from the test like the server drives it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpu_engine.settings.engine import EngineConfig
from hpu_engine.wire.framing import HEADER_BYTES, decode_to_server, encode_frame
from hpu_engine.wire.messages import Configure, RowOutput, StepOutputs, ToServer, ToWorker

TIMEOUT_SECONDS = 120.0


REAL = (sys.executable, "-m", "hpu_engine.worker.main")


class WorkerProcess:
    """`command` starts another program that speaks the same messages."""

    def __init__(self, config: EngineConfig, command: tuple[str, ...] = REAL, worker: int = 0) -> None:
        self.socket, theirs = socket.socketpair()
        words = [*command, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        self.process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
        theirs.close()
        self._buffer = b""
        self.seen: list[ToServer] = []
        self.start_up: tuple[ToServer, ...] = ()
        self.send(Configure(config=config, worker=worker))

    def send(self, message: ToWorker) -> None:
        self.socket.sendall(encode_frame(message))

    def receive(self, timeout_seconds: float = TIMEOUT_SECONDS) -> ToServer | None:
        """The next message, None at the end of the stream."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            if len(self._buffer) >= HEADER_BYTES:
                end = HEADER_BYTES + int.from_bytes(self._buffer[:HEADER_BYTES], "big")
                if len(self._buffer) >= end:
                    message = decode_to_server(self._buffer[HEADER_BYTES:end])
                    self._buffer = self._buffer[end:]
                    self.seen.append(message)
                    return message
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.socket], [], [], left)[0]:
                raise TimeoutError(f"the worker said nothing more; so far {self.seen[-5:]}")
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self._buffer += data

    def until(self, wanted: Callable[[ToServer], bool]) -> ToServer:
        """Read on until a message that satisfies `wanted`."""
        while (message := self.receive()) is not None:
            if wanted(message):
                return message
        raise EOFError(f"the worker ended; last words {self.seen[-3:]}")

    def rows_until_finished(self, request_id: str) -> list[RowOutput]:
        rows: list[RowOutput] = []
        while not rows or rows[-1].finish is None:
            message = self.until(lambda message: isinstance(message, StepOutputs))
            assert isinstance(message, StepOutputs)
            rows.extend(row for row in message.rows if row.request_id == request_id)
        return rows

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_SECONDS)


@contextmanager
def worker_process(config: EngineConfig, command: tuple[str, ...] = REAL, worker: int = 0) -> Iterator[WorkerProcess]:
    process = WorkerProcess(config, command, worker)
    try:
        yield process
    finally:
        process.socket.close()
        process.process.kill()
        process.process.wait()

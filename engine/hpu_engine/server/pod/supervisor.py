"""One worker process: started, listened to, watched, ended. Every way it can go becomes a frozen `Ending`.

A worker is lost when its process ends, its socket breaks, or it falls silent. Silence is counted in time the server
itself was awake for, so that a machine that was suspended does not cost a healthy worker its life.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from hpu_engine.server.pod.evidence import EXIT_SECONDS, Ending, Silence
from hpu_engine.server.pod.served_rank import ServedRank
from hpu_engine.wire.framing import ServerConnection, WireError
from hpu_engine.wire.messages import Configure, FromWorker, Stop

log = structlog.get_logger()

SILENCE_LIMIT_SECONDS = 8.0
"""A serving worker says something after every step and at least once a second. Detection has to take under ten."""
BUSY_SILENCE_LIMIT_SECONDS = 60.0
"""For a silent worker that works or waits for its turn: a huge step on a crowded machine is slow, not frozen."""
WATCH_SECONDS = 0.5
STDERR_LINES = 200
STDERR_LINE_BYTES = 16 * 1024

WORKER_COMMAND = (sys.executable, "-m", "hpu_engine.worker.main")


class Worker:
    """One worker of a rank. `run` lasts as long as its process, and returns None when it was told to end."""

    def __init__(self, rank: ServedRank, worker: int, configure: Configure, command: tuple[str, ...]) -> None:
        self._rank = rank
        self._view = rank.workers[worker]
        self._configure = configure
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._connection: ServerConnection | None = None
        self._is_stopping = False
        self._was_killed = False
        self._silence: Silence | None = None
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)

    async def run(self) -> Ending | None:
        process, connection = await self._start()
        tasks = [asyncio.create_task(self._relay_stderr(process)), asyncio.create_task(self._watch(process.pid))]
        protocol_error: str | None = None
        try:
            protocol_error = await self._listen(connection)
            seen_at = time.time()
        finally:
            connection.close()
            await self._reap(process)
            tasks[1].cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(tasks[0], 1.0)  # a grandchild may hold the pipe open
        if self._is_stopping:
            return None
        return self._ending(process, protocol_error, seen_at)

    async def _start(self) -> tuple[asyncio.subprocess.Process, ServerConnection]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--fd",
                str(theirs.fileno()),
                "--parent",
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the server, which then drains
                limit=STDERR_LINE_BYTES,
            )
        connection = await ServerConnection.open(ours)
        self._process, self._connection = process, connection
        if self._view.number == 0:
            self._rank.connect(connection)
        connection.send(self._configure)
        log.info("worker started", rank=self._rank.number, worker=self._view.number, pid=process.pid)
        if self._is_stopping:  # it was told to end before it existed
            self.kill()
        return process, connection

    async def _listen(self, connection: ServerConnection) -> str | None:
        """Until the worker's end of the socket closes; the text is what broke the protocol, if something did."""
        try:
            while (message := await connection.receive()) is not None:
                if isinstance(message, FromWorker) and message.worker != self._view.number:
                    return f"it speaks for worker {message.worker}"
                self._rank.handle(self._view, message)
        except (WireError, ConnectionError) as error:
            return str(error)
        return None

    def stop(self) -> None:
        """Ask it to leave. However it then ends, `run` returns None."""
        self._is_stopping = True
        if self._connection is not None:
            with suppress(ConnectionError):
                self._connection.send(Stop())

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
                self._was_killed = True

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        """The socket is closed, so the process has no reason to live on; a frozen one would never notice."""
        try:
            await asyncio.wait_for(process.wait(), EXIT_SECONDS if self._silence is None else 0.0)
        except TimeoutError:
            self.kill()
            await process.wait()

    async def _relay_stderr(self, process: asyncio.subprocess.Process) -> None:
        """The worker's own lines go where ours go; the last ones are kept, for they may say why it died."""
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # longer than the limit; the reader has dropped it
                continue
            if not line:
                return
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            self._stderr.append(line.decode(errors="replace").rstrip())

    async def _watch(self, pid: int) -> None:
        """Kills a serving worker that has been silent for too long, which then ends `run`."""
        silent_seconds = idle_seconds = 0.0
        seen, activity, before = self._view.messages_seen, _Activity.of(pid), time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            awake, before = min(now - before, 2 * WATCH_SECONDS), now
            earlier, activity = activity, _Activity.of(pid)
            if self._view.messages_seen != seen or not self._rank.is_serving:
                silent_seconds = idle_seconds = 0.0
                seen = self._view.messages_seen
                continue
            silent_seconds += awake
            idle_seconds = 0.0 if activity.is_more_than(earlier) else idle_seconds + awake
            is_busy = idle_seconds < SILENCE_LIMIT_SECONDS / 2
            if silent_seconds >= (BUSY_SILENCE_LIMIT_SECONDS if is_busy else SILENCE_LIMIT_SECONDS):
                self._silence = Silence(seconds=silent_seconds, is_stopped=activity.is_stopped)
                self.kill()
                return

    def _ending(self, process: asyncio.subprocess.Process, protocol_error: str | None, seen_at: float) -> Ending:
        return_code = process.returncode or 0
        return Ending(
            rank=self._rank.number,
            worker=self._view.number,
            pid=process.pid,
            return_code=return_code,
            seen_at=seen_at,
            was_ours=self._was_killed and return_code == -signal.SIGKILL,
            silence=self._silence,
            last_words=self._view.last_words,
            protocol_error=protocol_error,
            stderr=tuple(self._stderr),
            bucket=self._view.bucket,
        )


@dataclass(frozen=True)
class _Activity:
    """What the kernel says of a process: its main thread's state and its processor time so far (proc(5))."""

    state: str
    ticks: int

    @classmethod
    def of(cls, pid: int) -> _Activity:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it is gone, which its socket will tell
            return cls("X", 0)
        return cls(fields[0], int(fields[11]) + int(fields[12]))

    def is_more_than(self, earlier: _Activity) -> bool:
        """It ran since then, or would have if it had been given a processor or its page."""
        return self.ticks > earlier.ticks or self.state in "RD"

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"

"""The worker process: one card (on the CPU: one process) of a rank. `python -m hpu_engine.worker.main --fd N`.

Owns the life of the process: it speaks the messages of `hpu_engine.wire.messages` over the inherited socket N, sets
the thread policy before torch is imported, and dies with its server, whether that closes the socket or is killed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from hpu_engine.contract import EXIT_CODES, BucketRun, ExitCode, FailureReason, Phase
from hpu_engine.wire.framing import WireError, WorkerConnection
from hpu_engine.wire.messages import (
    Abort,
    Configure,
    Fatal,
    Heartbeat,
    Loaded,
    Progress,
    Ready,
    StepOutputs,
    Stop,
    Submit,
)
from hpu_engine.worker.threads import apply_thread_policy

if TYPE_CHECKING:
    from hpu_engine.step.loop import StepLoop

IDLE_HEARTBEAT_SECONDS = 0.5
PROGRESS_INTERVAL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


class _ServerGone(Exception):
    pass


def main() -> int:
    parser = argparse.ArgumentParser(description="One worker of a rank; started by the server process.")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the inherited socket")
    parser.add_argument("--parent", type=int, default=None, help="process id of the server, to notice its early death")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    connection = WorkerConnection.inherit(arguments.fd)
    try:
        configure = connection.receive()
        if not isinstance(configure, Configure):
            return ExitCode.INTERNAL
        return _Process(connection, configure).run()
    except (_ServerGone, WireError, ConnectionError) as error:
        # No message can be sent any more; the exit code shows in the process table.
        print(f"worker: the server is gone: {error!r}", file=sys.stderr)  # noqa: T201
        return ExitCode.INTERNAL


def die_with_parent(parent: int | None) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux, prctl(2)); the socket's end is the other way.

    The signal is for deaths after this call; `parent` tells of one before it.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(ExitCode.INTERNAL)


class _Process:
    """This process from its first message to its exit code."""

    def __init__(self, connection: WorkerConnection, configure: Configure) -> None:
        self._connection = connection
        self._configure = configure
        self._bucket: str | None = None
        self._bucket_began_at = 0.0
        self._progress_sent_at = 0.0

    def run(self) -> int:
        """Serve until told to stop. Returns the exit code."""
        # The server decides when a worker ends; a Ctrl-C at the terminal reaches it first.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._say(Progress(phase=Phase.STARTING))
        in_time = apply_thread_policy(self._configure.pod_workers)
        assert in_time, "torch is imported before the thread policy"
        from hpu_engine.worker.start_up import StartUpError, open_rank

        try:
            rank = open_rank(self._configure.config, self._on_progress)
            self._say(rank.loaded)
            rank.warm_up(self._on_progress)
            self._say(Ready())
            self._serve(rank.loop)
        except StartUpError as error:
            return self._fail(error.reason, error.message, path=error.path, tensor=error.tensor)
        except MemoryError:
            return self._fail(FailureReason.INSUFFICIENT_MEMORY, "an allocation failed")
        except (_ServerGone, WireError, ConnectionError):
            raise
        except Exception as error:  # the last words of this process
            return self._fail(_reason_of(error), f"{type(error).__name__}: {error}")
        return ExitCode.OK

    def _serve(self, loop: StepLoop) -> None:
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        while True:
            if not loop.has_work:
                self._heartbeat(loop)
                poll.poll(IDLE_HEARTBEAT_SECONDS * 1000)
            if self._take_messages(loop):
                return
            if loop.has_work:
                self._step(loop)

    def _step(self, loop: StepLoop) -> None:
        try:
            result = loop.step()
        finally:
            self._bucket = loop.shape
        if result.outputs or result.num_tokens:
            self._connection.send(
                StepOutputs(
                    rows=result.outputs,
                    step_seconds=result.seconds,
                    batched_tokens=result.num_tokens,
                    begun=result.begun,
                )
            )
        for rejected in result.rejected:
            self._connection.send(rejected)
        self._heartbeat(loop)

    def _take_messages(self, loop: StepLoop) -> bool:
        """Returns whether the server said stop."""
        messages, is_open = self._connection.receive_pending()
        for message in messages:
            match message:
                case Submit():
                    refused = loop.submit(message)
                    if refused is not None:
                        self._connection.send(refused)
                case Abort():
                    loop.abort(message.request_ids)
                case Stop():
                    return True
                case Configure():
                    raise WireError("a second Configure")
        if not is_open:
            raise _ServerGone("it closed the socket")
        return False

    def _heartbeat(self, loop: StepLoop) -> None:
        self._say(loop.heartbeat())

    def _say(self, message: Progress | Loaded | Ready | Heartbeat | Fatal) -> None:
        self._connection.send(msgspec.structs.replace(message, worker=self._configure.worker))

    def _on_progress(self, progress: Progress) -> None:
        """Send start-up progress, at most a few times a second within one phase's bytes."""
        now = time.monotonic()
        if progress.phase is Phase.WARMING_UP:
            # A bucket is reported before it runs, so that the next report is the end of this one.
            if progress.ran is None and progress.done and self._bucket is not None:
                run = BucketRun(bucket=self._bucket, seconds=now - self._bucket_began_at)
                progress = msgspec.structs.replace(progress, ran=run)
            self._bucket_began_at = now
        self._bucket = progress.current
        loading = progress.phase is Phase.LOADING and 0 < progress.done < progress.total
        if loading and now - self._progress_sent_at < PROGRESS_INTERVAL_SECONDS:
            return
        self._progress_sent_at = now
        self._say(progress)

    def _fail(self, reason: FailureReason, message: str, *, path: str | None = None, tensor: str | None = None) -> int:
        self._say(Fatal(reason=reason, message=message, path=path, tensor=tensor, bucket=self._bucket))
        return EXIT_CODES[reason]


def _reason_of(error: Exception) -> FailureReason:
    # torch reports a failed CPU allocation as a RuntimeError of its allocator.
    is_memory = "DefaultCPUAllocator" in str(error) or "can't allocate memory" in str(error)
    return FailureReason.INSUFFICIENT_MEMORY if is_memory else FailureReason.INTERNAL


if __name__ == "__main__":
    sys.exit(main())

"""A server started for the measurement and ended with it, and how long it took until it gave its first token."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from hpu_engine.bench.client import BenchError, Target, complete, served_model
from hpu_engine.bench.workload import Request

END_SECONDS = 15.0
_POLL_SECONDS = 0.1
_LOG_TAIL_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Started:
    """`start_up_seconds` from the start of the process to the end of the first completion of one token."""

    pid: int
    start_up_seconds: float


@asynccontextmanager
async def running(
    command: Sequence[str],
    base_url: str,
    *,
    log: Path,
    limit_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Started]:
    """Run `command` in a process group of its own, wait for one token, end the whole group afterwards.

    SIGTERM cancels the calling task while the server runs, so that a measurement that is told to end takes it along.
    Raises BenchError when it exits first or is not ready within `limit_seconds`; the message ends with its last output.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began = time.perf_counter()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=output,
            stderr=output,
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        await _first_token(process, base_url, began + limit_seconds, log)
        yield Started(process.pid, time.perf_counter() - began)
    finally:
        await _end(process)


async def _first_token(process: asyncio.subprocess.Process, base_url: str, deadline: float, log: Path) -> None:
    probe = Request(kind="probe", start_seconds=0.0, prompt=(1, 2, 3), max_tokens=1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        why = "no connection"
        while time.perf_counter() < deadline:
            if process.returncode is not None:
                raise BenchError(f"the server exited with {process.returncode} before it was ready:\n{_tail(log)}")
            try:
                target = Target(base_url, await served_model(session, base_url))
                now = time.perf_counter()
                answer = await complete(session, target, probe, now, deadline - now)
                if answer.tokens == 1 and answer.error is None:
                    return
                why = answer.error or "no token"
            except BenchError as error:
                why = str(error)
            await asyncio.sleep(_POLL_SECONDS)
    raise BenchError(f"the server was not ready in time ({why}):\n{_tail(log)}")


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            continue
    await process.wait()


def _tail(log: Path) -> str:
    return log.read_bytes()[-_LOG_TAIL_CHARS:].decode(errors="replace")

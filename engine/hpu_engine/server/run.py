"""`hpu-engine serve` from the first second to the exit code: ports, worker, model, serving, drain, evidence.

The control port opens before anything slow begins, and closes last.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web

from hpu_engine.contract import EXIT_CODES, ExitCode, FailureReason, Phase, TerminationMessage
from hpu_engine.server.errors import ApiError
from hpu_engine.server.listener import (
    BACKLOG,
    CONTROL_BACKLOG,
    CONTROL_CONNECTIONS,
    Runner,
    bind,
    most_connections,
)
from hpu_engine.server.metrics import Metrics
from hpu_engine.server.pod.control import build_control
from hpu_engine.server.pod.drain import Shutdown, drain
from hpu_engine.server.pod.pod import Pod
from hpu_engine.server.pod.rank import Rank
from hpu_engine.server.pod.supervisor import WORKER_COMMAND, Worker
from hpu_engine.server.pod.termination import Failed, in_words, write_termination_log
from hpu_engine.server.terminal import configure_logging, log_progress, show_progress
from hpu_engine.settings.serve import ServeSettings, flag_of, unknown_variables

log = structlog.get_logger()

FAILED_LINGER_SECONDS = 2.0
"""After a failure while serving: how long streams get to end and the control port says what happened."""
STOP_SECONDS = 5.0
SWITCH_SECONDS = 0.001
"""How long a thread that reads or writes a large body may keep the event loop from going on."""
ABORTED_EXIT_CODE = 143
"""128 + SIGTERM: somebody did not want to wait for the drain."""


def run(settings: ServeSettings, worker_command: tuple[str, ...] = WORKER_COMMAND) -> int:
    """Serve until told to stop. Returns the exit code; a failure is on stderr and in the termination log by then."""
    configure_logging()
    sys.setswitchinterval(SWITCH_SECONDS)
    for sentence in unknown_variables(os.environ):
        log.warning(sentence)
    try:
        return asyncio.run(_serve(settings, worker_command))
    except Failed as failed:
        evidence = failed.evidence
    except Exception as error:
        log.exception("the server failed")
        evidence = _internal(error)
    sys.stderr.write(f"error: {in_words(evidence)}\n")
    if settings.termination_log is not None:
        write_termination_log(settings.termination_log, evidence)
    return EXIT_CODES[evidence.reason]


async def _serve(settings: ServeSettings, worker_command: tuple[str, ...]) -> int:
    metrics = Metrics(settings.model_name)
    rank = Rank(0, metrics.for_rank(0))
    pod = Pod([rank], settings.identity(), settings.plan_input())
    shutdown = Shutdown()
    shutdown.listen()
    async with AsyncExitStack() as closing:
        control = await _listen(closing, build_control(pod, metrics), settings, "control_port")
        worker = Worker(rank, settings.engine_config(), worker_command)
        return await _Server(settings, pod, worker, metrics, shutdown, closing).serve(control)


@dataclass
class _Server:
    """The parts of a running server, and the order in which they begin and end."""

    settings: ServeSettings
    pod: Pod
    worker: Worker
    metrics: Metrics
    shutdown: Shutdown
    closing: AsyncExitStack
    has_served: bool = False

    def __post_init__(self) -> None:
        # These imports are what a start waits for longest; the control port is open by now.
        from hpu_engine.server.requests.admission import Engine
        from hpu_engine.server.requests.serving import Serving

        self.engine = Engine(self.pod.ranks, self.settings.max_open_requests)
        self.serving = Serving(self.pod, self.engine, self.settings.model_name, int(time.time()))

    async def serve(self, control: str) -> int:
        from hpu_engine.server.api.app import build_api

        application = build_api(self.serving, self.metrics, self.settings.allowed_origins)
        api = await _listen(self.closing, application, self.settings, "port")
        log.info("listening", api=api, control=control)
        running = asyncio.create_task(self._run_worker())
        loading = asyncio.create_task(self._load_model())
        bars = asyncio.create_task(show_progress(self.pod))
        lines = asyncio.create_task(log_progress(self.pod))
        announcing = asyncio.create_task(self._announce(api, loading))
        try:
            await _first_of(self.shutdown.requested.wait(), self.pod.has_failed.wait())
            if self.pod.failure is None:
                await self._leave()
            if self.pod.failure is not None:
                await self._show_failure(self.pod.failure)
        finally:
            for task in (loading, bars, lines, announcing):
                task.cancel()
            await self._end_worker(running)
        if self.pod.failure is not None:
            raise Failed(self.pod.failure)
        return ABORTED_EXIT_CODE if self.shutdown.aborted.is_set() else ExitCode.OK

    async def _leave(self) -> None:
        """Drain, unless nothing is served yet, or a worker is lost while we wait."""
        if not self.has_served:
            self.pod.drain()
            return
        draining = drain(
            self.serving,
            self.shutdown,
            lame_duck_seconds=self.settings.lame_duck_seconds,
            drain_seconds=self.settings.drain_seconds,
        )
        await _first_of(draining, self.pod.has_failed.wait())

    async def _show_failure(self, evidence: TerminationMessage) -> None:
        """Open streams get their error; where clients or an operator look, they get time to see it."""
        self.engine.fail_all(ApiError(500, f"the engine failed: {in_words(evidence)}", code="engine_failed"))
        if self.has_served:
            await asyncio.sleep(FAILED_LINGER_SECONDS)

    async def _run_worker(self) -> None:
        try:
            evidence = await self.worker.run()
        except Exception as error:
            log.exception("the supervision of a worker failed")
            evidence = _internal(error)
        if evidence is not None:
            self.pod.fail(evidence)

    async def _load_model(self) -> None:
        from hpu_engine.server.model_files import load_model

        try:
            model = await asyncio.to_thread(load_model, self.settings.model)
        except Failed as failed:
            self.pod.fail(failed.evidence)
        except Exception as error:
            log.exception("the model's files cannot be read")
            self.pod.fail(_internal(error))
        else:
            self.serving.has_loaded(model)
            self.pod.has_read_model()

    async def _announce(self, api: str, loading: asyncio.Task[None]) -> None:
        for rank in self.pod.ranks:
            await rank.became_ready.wait()
        await asyncio.shield(loading)
        if self.pod.phase is not Phase.READY:
            return
        self.has_served = True
        limits = self.engine.limits
        log.info(
            "ready",
            model=self.settings.model_name,
            api=api,
            seconds=round(self.pod.state().uptime_seconds, 1),
            dtype=limits.dtype,
            kernels=limits.kernels,
            max_model_len=limits.most_tokens,
            kv_blocks=limits.num_kv_blocks,
        )

    async def _end_worker(self, running: asyncio.Task[None]) -> None:
        """A worker that serves is asked to leave; one that still loads does not listen, and has nothing to lose."""
        self.worker.stop()
        if self.has_served and self.pod.failure is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(running), STOP_SECONDS)
        self.worker.kill()
        await running


def _internal(error: Exception) -> TerminationMessage:
    return TerminationMessage(reason=FailureReason.INTERNAL, message=f"{type(error).__name__}: {error}")


async def _listen(closing: AsyncExitStack, app: web.Application, settings: ServeSettings, field: str) -> str:
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


async def _first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Until one of these is done; the others are cancelled. An error of the one that is done is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()

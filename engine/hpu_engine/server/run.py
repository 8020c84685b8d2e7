"""`hpu-engine serve` from the first second to the exit code: ports, workers, model, serving, drain, evidence.

The control port opens before anything slow begins, and closes last.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog

from hpu_engine.contract import EXIT_CODES, ExitCode, FailureReason, GroupMember, Phase, TerminationMessage
from hpu_engine.server.errors import ApiError
from hpu_engine.server.metrics import Metrics
from hpu_engine.server.open_port import open_port
from hpu_engine.server.pod.control import build_control
from hpu_engine.server.pod.drain import Shutdown, drain
from hpu_engine.server.pod.pod import Pod
from hpu_engine.server.pod.served_rank import ServedRank
from hpu_engine.server.pod.supervisor import WORKER_COMMAND
from hpu_engine.server.pod.termination import Failed, in_words, write_termination_log
from hpu_engine.server.pod.workers import Workers
from hpu_engine.server.terminal import configure_logging, log_progress, show_progress
from hpu_engine.server.waiting import background, first_of
from hpu_engine.settings.serve import ServeSettings, unknown_variables

log = structlog.get_logger()

FAILED_LINGER_SECONDS = 2.0
"""After a failure while serving: how long streams get to end and the control port says what happened."""
SWITCH_SECONDS = 0.001
"""How long a thread that reads or writes a large body may keep the event loop from going on."""
ABORTED_EXIT_CODE = 143
"""128 + SIGTERM: a second signal cut the drain short."""


@dataclass(frozen=True)
class PodLayout:
    """The ranks of this pod, each with `tensor` workers that `command` starts."""

    ranks: int = 1
    tensor: int = 1
    command: tuple[str, ...] = WORKER_COMMAND


def run(settings: ServeSettings, layout: PodLayout | None = None) -> int:
    """Serve until told to stop. Returns the exit code; a failure is on stderr and in the termination log by then."""
    configure_logging()
    sys.setswitchinterval(SWITCH_SECONDS)
    for sentence in unknown_variables(os.environ):
        log.warning(sentence)
    try:
        return asyncio.run(_serve(settings, layout or _layout(settings)))
    except Failed as failed:
        evidence = failed.evidence
    except Exception as error:
        log.exception("the server failed")
        evidence = _internal(error)
    sys.stderr.write(f"error: {in_words(evidence)}\n")
    if settings.termination_log is not None:
        write_termination_log(settings.termination_log, evidence)
    return EXIT_CODES[evidence.reason]


def _layout(settings: ServeSettings) -> PodLayout:
    return PodLayout(settings.data_parallel_size, settings.tensor_parallel_size)


async def _serve(settings: ServeSettings, layout: PodLayout) -> int:
    metrics = Metrics(settings.model_name)
    ranks = [ServedRank(number, metrics.for_rank(number), layout.tensor) for number in range(layout.ranks)]
    pod = Pod(ranks, settings.identity(), settings.plan_input(), _member())
    workers = Workers(ranks, settings.engine_config(), layout.command)
    shutdown = Shutdown()
    shutdown.listen()
    async with AsyncExitStack() as closing:
        control = await open_port(closing, build_control(pod, metrics), settings, "control_port")
        return await _Server(settings, pod, workers, metrics, shutdown, closing).serve(control)


def _member() -> GroupMember | None:
    """In a cluster the host is called like the pod, and the operator's pods say in their names which one they are."""
    return GroupMember.from_pod_name(socket.gethostname()) if "KUBERNETES_SERVICE_HOST" in os.environ else None


@dataclass
class _Server:
    """The parts of a running server, and the order in which they begin and end."""

    settings: ServeSettings
    pod: Pod
    workers: Workers
    metrics: Metrics
    shutdown: Shutdown
    closing: AsyncExitStack
    has_served: bool = False

    def __post_init__(self) -> None:
        # These imports are what a start waits for longest; the control port is open by now.
        from hpu_engine.server.requests.admission import Admission
        from hpu_engine.server.requests.serving_model import ServingModel

        self.admission = Admission(self.pod, self.settings.max_open_requests)
        self.serving = ServingModel(self.pod, self.admission, self.settings.model_name, int(time.time()))

    async def serve(self, control: str) -> int:
        from hpu_engine.server.api.app import build_api

        application = build_api(self.serving, self.metrics, self.settings.allowed_origins)
        api = await open_port(self.closing, application, self.settings, "port")
        log.info("listening", api=api, control=control)
        starting = (self._load_model(), self._announce(api), show_progress(self.pod), log_progress(self.pod))
        async with self._running_workers(), background(*starting):
            await first_of(self.shutdown.requested.wait(), self.pod.has_failed.wait())
            if self.pod.failure is None:
                await self._leave()
            if self.pod.failure is not None:
                await self._show_failure(self.pod.failure)
        if self.pod.failure is not None:
            raise Failed(self.pod.failure)
        return ABORTED_EXIT_CODE if self.shutdown.aborted.is_set() else ExitCode.OK

    @asynccontextmanager
    async def _running_workers(self) -> AsyncIterator[None]:
        """Workers that serve are asked to leave; those that still load do not listen, and have nothing to lose."""
        watching = asyncio.create_task(self._watch_workers())
        try:
            yield
        finally:
            await self.workers.end(at_ease=self.has_served and self.pod.failure is None)
            await watching

    async def _watch_workers(self) -> None:
        try:
            evidence = await self.workers.run()
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

    async def _announce(self, api: str) -> None:
        await self.pod.wait_until_ready()
        if self.pod.phase is not Phase.READY:
            return
        self.has_served = True
        limits = self.admission.limits
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

    async def _leave(self) -> None:
        """Drain, unless nothing is served yet, or a worker is lost meanwhile."""
        if not self.has_served:
            self.pod.drain()
            return
        draining = drain(
            self.serving,
            self.shutdown,
            lame_duck_seconds=self.settings.lame_duck_seconds,
            drain_seconds=self.settings.drain_seconds,
        )
        await first_of(draining, self.pod.has_failed.wait())

    async def _show_failure(self, evidence: TerminationMessage) -> None:
        """Open streams get their error; clients and an operator get time to see it."""
        self.admission.fail_all(ApiError(500, f"the engine failed: {in_words(evidence)}", code="engine_failed"))
        if self.has_served:
            await asyncio.sleep(FAILED_LINGER_SECONDS)


def _internal(error: Exception) -> TerminationMessage:
    return TerminationMessage(reason=FailureReason.INTERNAL, message=f"{type(error).__name__}: {error}")

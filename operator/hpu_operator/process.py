"""Wiring, signals, exit codes: from a standby replica to a leader at work, and down again in order.

Start: web, connection, lease, cache, watches, workers. End (SIGTERM, lease lost, watches ended, a task failed): not
ready, no new keys, running reconciles finish, watches stop, lease released, connections closed, web last. Only SIGTERM
ends with exit code 0; after anything else the kubelet starts a new process, which loses nothing.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import structlog

from hpu_operator.control_client import ControlClient, ControlUrl, control_url
from hpu_operator.handlers import Watches
from hpu_operator.kube.client import Client, connect
from hpu_operator.kube.kinds import Kind
from hpu_operator.kube.port import KubeError
from hpu_operator.metrics import Metrics
from hpu_operator.runtime.inputs.cache import Cache
from hpu_operator.runtime.inputs.control_watch import ControlWatch
from hpu_operator.runtime.inputs.intake import Intake
from hpu_operator.runtime.inputs.observer import Observer
from hpu_operator.runtime.leadership.leader_only import LeaderOnly
from hpu_operator.runtime.leadership.lease import Lease
from hpu_operator.runtime.outputs.announcer import Announcer
from hpu_operator.runtime.outputs.children import Children
from hpu_operator.runtime.outputs.status_writer import StatusWriter
from hpu_operator.runtime.queue import Queue
from hpu_operator.runtime.reconcile_loop import work
from hpu_operator.runtime.reconciler import Reconciler
from hpu_operator.settings import Settings
from hpu_operator.web import Web

_DRAIN_SECONDS = 20.0
_KOPF_SECONDS = 10.0
_LIST_RETRY_SECONDS = 2.0
_LAG_SECONDS = 30.0

_log = structlog.get_logger(__name__)


class Operator:
    """One process. `url_of` says where a pod's control endpoint is; tests replace it."""

    def __init__(self, settings: Settings, url_of: ControlUrl = control_url) -> None:
        self._settings = settings
        self._url_of = url_of
        self._metrics = Metrics()
        self._stop = asyncio.Event()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._beat = time.monotonic()
        self._stopping = False

    def stop(self) -> None:
        """End in order, with exit code 0."""
        self._stop.set()

    async def run(self) -> int:
        """Until stopped. Returns the exit code."""
        web = Web(self._metrics, alive=self._alive, ready=self._ready)
        await web.start(self._settings.listen_host, self._settings.listen_port)
        heart = asyncio.create_task(self._heartbeat())
        client = await connect(self._metrics)
        try:
            return await self._lead(client)
        finally:
            await client.close()
            heart.cancel()
            await web.stop()

    async def _lead(self, client: Client) -> int:
        settings = self._settings
        lease = Lease(client, settings.lease_namespace, settings.lease_name, settings.identity, time.monotonic)
        if not await self._unless_stopped(lease.acquire()):
            return 0
        self._metrics.leader.set(1)
        control = ControlClient()
        try:
            return await self._work(client, control, lease)
        finally:
            await control.close()
            await lease.release()
            self._metrics.leader.set(0)

    async def _work(self, client: Client, control: ControlClient, lease: Lease) -> int:
        queue = Queue(self._metrics, time.monotonic)
        cache = Cache()
        watch = ControlWatch(control, self._metrics, time.monotonic, queue.add)
        observer = Observer(client, cache, watch, self._url_of, time.monotonic)
        reconciler = _reconciler(cache, observer, LeaderOnly(client, lease), self._settings.engine_image_cpu)
        scopes = self._settings.scopes
        intake = Intake(client, cache, queue, scopes=scopes, metrics=self._metrics, clock=time.monotonic)
        held = self._task("lease lost", lease.hold())
        if not await self._unless_stopped(_filled(intake)):
            held.cancel()
            return 0
        tasks = [held, self._task("control watch ended", watch.run()), self._task("sweep ended", intake.sweep())]
        workers = [
            self._task("worker ended", work(queue, reconciler, lease, self._metrics))
            for _ in range(self._settings.workers)
        ]
        kopf = self._start_watches(intake)
        reason = await self._until_end()
        self._stopping = True
        _log.info("stopping", reason=reason or "asked to")
        queue.close()
        await asyncio.wait(workers, timeout=_DRAIN_SECONDS)
        kopf.stop()
        await asyncio.to_thread(kopf.join, _KOPF_SECONDS)
        for task in (*tasks, *workers):
            task.cancel()
        await asyncio.gather(*tasks, *workers, return_exceptions=True)
        return 1 if reason else 0

    def _start_watches(self, intake: Intake) -> Watches:
        loop = asyncio.get_running_loop()

        def sink(kind: Kind, type_: str | None, live: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(intake.event, kind, type_, live)

        def ended(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(self._end, f"watches ended: {error!r}")

        kopf = Watches(self._settings.namespaces, sink, ended)
        kopf.start()
        return kopf

    def _task(self, what_its_end_means: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose end, with or without an error, ends the process.

        Not an `asyncio.TaskGroup`: that would cancel the lease and running reconciles at the first failure, and what
        has begun is to finish while the lease is still held.
        """
        task = asyncio.create_task(coroutine)

        def on_done(done: asyncio.Task[None]) -> None:
            if not done.cancelled():
                self._end(f"{what_its_end_means}: {done.exception()!r}" if done.exception() else what_its_end_means)

        task.add_done_callback(on_done)
        return task

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def _until_end(self) -> str:
        """Why the process has to end; empty where it was asked to."""
        stop = asyncio.create_task(self._stop.wait())
        waiting: set[asyncio.Future[Any]] = {stop, self._ended}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        return self._ended.result() if self._ended.done() else ""

    async def _unless_stopped(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        """Whether `coroutine` finished before the process was asked to end."""
        stop = asyncio.create_task(self._stop.wait())
        task = asyncio.create_task(coroutine)
        await asyncio.wait([stop, task], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        return False

    async def _heartbeat(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(1.0)

    def _alive(self) -> str | None:
        lag = time.monotonic() - self._beat
        return f"the event loop has not run for {lag:.0f} s" if lag > _LAG_SECONDS else None

    def _ready(self) -> str | None:
        return "stopping" if self._stopping else None


def _reconciler(cache: Cache, observer: Observer, leader: LeaderOnly, default_image: str) -> Reconciler:
    announcer = Announcer(leader)
    return Reconciler(
        cache=cache,
        children=Children(leader, cache, announcer),
        observer=observer,
        status=StatusWriter(leader, cache, time.monotonic),
        announcer=announcer,
        default_image=default_image,
        now=lambda: datetime.now(UTC),
    )


async def _filled(intake: Intake) -> None:
    """The first lists, for as long as it takes: without the CRD or the API server there is nothing to do."""
    while True:
        try:
            await intake.fill()
        except KubeError as error:
            _log.warning("cannot list yet", error=str(error))
            await asyncio.sleep(_LIST_RETRY_SECONDS)
        else:
            return


async def run(settings: Settings) -> int:
    """Run with SIGTERM and SIGINT ending it in order. Returns the exit code."""
    operator = Operator(settings)
    loop = asyncio.get_running_loop()
    stop: Callable[[], None] = operator.stop
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return await operator.run()

"""Every kopf decorator: kopf delivers watch events, and that is all it is asked to do.

No annotations, finalizers, indices, timers, daemons, peering or webhooks. It runs in a thread with its own event loop,
so that it neither replaces this process' signal handlers nor cancels tasks that are not its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import kopf
from kopf._core.engines import peering

from hpu_operator.api import schema
from hpu_operator.domain.names import MANAGER
from hpu_operator.kube.client import in_cluster
from hpu_operator.kube.kinds import WATCHED, Kind
from hpu_operator.runtime.jitter import jittered

Sink = Callable[[Kind, str | None, dict[str, Any]], None]
"""Kind, type of the event (None: part of a list), object. Called in kopf's thread."""

_ANNOTATION_PREFIX = schema.GROUP


class Backoffs:
    """Pauses between attempts to reach the API server, without an end: kopf gives up when they run out."""

    def __iter__(self) -> Iterator[float]:
        pause = 0.5
        while True:
            yield jittered(pause)
            pause = min(pause * 2, 5.0)


def registry(sink: Sink) -> kopf.OperatorRegistry:
    """The handlers: one per kind, each three lines."""
    handlers = kopf.OperatorRegistry()
    for kind in WATCHED:
        _watch(handlers, kind, sink)

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) if in_cluster() else kopf.login_with_kubeconfig(**kwargs)

    return handlers


def _watch(handlers: kopf.OperatorRegistry, kind: Kind, sink: Sink) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, registry=handlers, id=kind.plural)
    async def deliver(event: Any, **_: Any) -> None:  # a plain function would cost a thread per event
        sink(kind, event.get("type"), dict(event["object"]))


def settings() -> kopf.OperatorSettings:
    """kopf's settings: fixed kinds, own selectors, a watchdog for silent streams, retries without an end."""
    chosen = kopf.OperatorSettings()
    chosen.peering.standalone = True
    chosen.scanning.disabled = True
    chosen.posting.enabled = False
    chosen.watching.server_timeout = 290
    chosen.watching.client_timeout = 330
    chosen.watching.connect_timeout = 10
    chosen.watching.inactivity_timeout = 70
    chosen.watching.chunk_size = 500
    for kind in WATCHED:
        if kind.selector:
            chosen.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    chosen.networking.request_timeout = 30
    chosen.networking.connect_timeout = 10
    chosen.networking.error_backoffs = Backoffs()
    chosen.queueing.idle_timeout = 1.0
    chosen.execution.max_workers = 2
    # Never written, because no handler needs it; the shared defaults would clash with other operators if one did.
    chosen.persistence.finalizer = f"{_ANNOTATION_PREFIX}/kopf"
    chosen.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=_ANNOTATION_PREFIX, v1=False)
    chosen.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=_ANNOTATION_PREFIX, v1=False)
    return chosen


class Watches(threading.Thread):
    """kopf in a thread. `on_end` is called in that thread when kopf ends, with its error if it had one."""

    def __init__(self, namespaces: tuple[str, ...], sink: Sink, on_end: Callable[[BaseException | None], None]) -> None:
        super().__init__(name="kopf", daemon=True)
        self._namespaces = namespaces
        self._sink = sink
        self._on_end = on_end
        self._stop_flag = threading.Event()
        for noisy in ("kopf.objects", "kopf.activities", "kopf._core", "kopf._cogs"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        # It warns that a thread gets no signals, which is what the thread is for.
        logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)

    def run(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._operate())
        except BaseException as ended:
            error = ended
        with contextlib.suppress(RuntimeError):  # the process' loop may be closed already
            self._on_end(error)

    async def _operate(self) -> None:
        await kopf.operator(
            registry=registry(self._sink),
            settings=settings(),
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop_flag,
            # Otherwise kopf makes one up from the user's name, and a container's user has none.
            identity=peering.Identity(MANAGER),
        )

    def stop(self) -> None:
        """Ask kopf to end. Returns at once."""
        self._stop_flag.set()

"""Works on the queue: a fixed number of reconciles at a time. A failure concerns one object only."""

from __future__ import annotations

import time

import structlog

from hpu_operator.kube.port import KubeError, Unavailable
from hpu_operator.metrics import Metrics
from hpu_operator.runtime.key import Key
from hpu_operator.runtime.leadership.lease import Lease
from hpu_operator.runtime.queue import FAILURE_LIMIT_SECONDS, UNAVAILABLE_LIMIT_SECONDS, Queue
from hpu_operator.runtime.reconciler import Reconciler

_log = structlog.get_logger(__name__)


async def work(queue: Queue, reconciler: Reconciler, lease: Lease, metrics: Metrics) -> None:
    """One worker, at work while the lease is confirmed; returns when the queue is closed."""
    while (key := await queue.take()) is not None:
        await lease.confirmed()
        began = time.monotonic()
        result = await _one(key, queue, reconciler)
        metrics.reconciled(result, time.monotonic() - began)


async def _one(key: Key, queue: Queue, reconciler: Reconciler) -> str:
    try:
        again = await reconciler.reconcile(key)
    except Unavailable as error:
        delay = queue.failed(key, UNAVAILABLE_LIMIT_SECONDS)
        _log.warning("reconcile postponed", object=str(key), error=str(error), retry_seconds=round(delay, 1))
        return "unavailable"
    except KubeError as error:
        delay = queue.failed(key, FAILURE_LIMIT_SECONDS)
        _log.warning("reconcile refused", object=str(key), error=str(error), retry_seconds=round(delay, 1))
        return "refused"
    except Exception:  # one object's surprise must not stop the others
        delay = queue.failed(key, FAILURE_LIMIT_SECONDS)
        _log.exception("reconcile failed", object=str(key), retry_seconds=round(delay, 1))
        return "error"
    queue.done(key)
    if again is not None:
        queue.add(key, again)
    return "ok"

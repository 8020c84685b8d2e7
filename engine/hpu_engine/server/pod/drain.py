"""How a server leaves: the first SIGTERM (or Ctrl-C) drains, the second one aborts.

Not ready at once. For the lame duck's time new requests are still served, because a load balancer needs a moment to
notice; while requests keep coming this lasts longer, up to half of the drain's time. Then they get 503 while the
running ones finish, or are cut when the drain's time is over. A pod of a group waits for the group's other pods, too:
their requests need its workers.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import structlog

from hpu_engine.server.errors import ApiError
from hpu_engine.server.waiting import within

if TYPE_CHECKING:  # it stands on the tokenizer, which the first second does not wait for
    from hpu_engine.server.requests.serving_model import ServingModel

log = structlog.get_logger()

QUIET_SECONDS = 2.0
"""Without a new request for this long, the load balancer has noticed."""


class Shutdown:
    """Counts the signals. `requested` is the first, `aborted` the second."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.aborted = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signal, number)

    def signal(self, number: int) -> None:
        log.info("signal", name=signal.Signals(number).name)
        (self.aborted if self.requested.is_set() else self.requested).set()


async def drain(serving: ServingModel, shutdown: Shutdown, *, lame_duck_seconds: float, drain_seconds: float) -> None:
    """Returns when nothing is open any more. A second signal cuts it short, with an error for what still runs."""
    serving.pod.drain()
    log.info("draining", lame_duck_seconds=lame_duck_seconds, drain_seconds=drain_seconds)
    drained_by = time.monotonic() + lame_duck_seconds + drain_seconds
    await _unless_aborted(shutdown, asyncio.sleep(lame_duck_seconds))
    if lame_duck_seconds:
        await _unless_aborted(shutdown, _until_quiet(serving, drained_by - drain_seconds / 2))
    serving.accepts_requests = False
    left = max(0.0, drained_by - time.monotonic())
    finished = await _unless_aborted(shutdown, within(left, serving.admission.wait_until_idle()))
    if not finished:
        serving.admission.fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))
        await within(1.0, serving.admission.wait_until_idle())
    log.info("drained", finished=bool(finished))


async def _until_quiet(serving: ServingModel, deadline: float) -> None:
    """Returns when no request came for `QUIET_SECONDS`, at `deadline` (of the monotonic clock) at the latest."""
    while (now := time.monotonic()) < min(deadline, quiet_at := serving.last_request_at + QUIET_SECONDS):  # noqa: ASYNC110 - a time to wait for, not a fact
        await asyncio.sleep(min(deadline, quiet_at) - now)


async def _unless_aborted(shutdown: Shutdown, work: Coroutine[Any, Any, Any]) -> object:
    """The result of `work`, or None at once when the second signal comes."""
    task = asyncio.ensure_future(work)
    aborted = asyncio.ensure_future(shutdown.aborted.wait())
    done, rest = await asyncio.wait({task, aborted}, return_when=asyncio.FIRST_COMPLETED)
    for other in rest:
        other.cancel()
    return task.result() if task in done else None

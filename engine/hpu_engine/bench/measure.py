"""Runs workloads against one server and makes its report: reference step, load, memory, reference step."""

from __future__ import annotations

import asyncio
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from hpu_engine.bench.client import LINE_LIMIT_BYTES, BenchError, Target, run_workload, served_model
from hpu_engine.bench.figures import WorkloadFigures, summarise
from hpu_engine.bench.memory import tree_pss_bytes
from hpu_engine.bench.reference import ReferenceStep
from hpu_engine.bench.report import Report
from hpu_engine.bench.workload import Request, TokenIds, Workload, WorkloadName, build

_MEMORY_EVERY_SECONDS = 2.0
_SETTLE_SECONDS = 1.0
"""Between two workloads: what the last one left running ends, and threads that spin go to sleep."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`workload_seconds`: longest time of one workload."""

    workload_seconds: float = 600.0


@dataclass(slots=True)
class Measurement:
    """One server under test. `pid` (None: memory is not measured) is the root of its process tree."""

    name: str
    base_url: str
    model: str | None = None
    pid: int | None = None
    start_up_seconds: float | None = None
    ids: TokenIds = field(default_factory=lambda: TokenIds(1000, 20000))
    bounds: Bounds = field(default_factory=Bounds)
    runs: list[WorkloadFigures] = field(default_factory=list)
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    async def run(self, name: WorkloadName, rng: random.Random, reference: ReferenceStep) -> WorkloadFigures:
        """One more run of a workload. Raises BenchError when the server is not there."""
        workload = build(name, self.ids, rng)
        connector = aiohttp.TCPConnector(limit=workload.concurrency)
        timeout = aiohttp.ClientTimeout(total=None, connect=30)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, read_bufsize=LINE_LIMIT_BYTES
        ) as session:
            self.model = self.model or await served_model(session, self.base_url)
            target = Target(self.base_url, self.model)
            await self._settle(session, target, rng)
            before = reference.measure()
            done = asyncio.Event()
            memory = asyncio.create_task(_peak_memory(self.pid, done))
            try:
                answers = await run_workload(session, target, workload, self.bounds.workload_seconds)
            finally:
                done.set()
            peak = await memory
        await asyncio.sleep(_SETTLE_SECONDS)
        figures = summarise(workload.name, answers, (before, reference.measure()), peak)
        self.runs.append(figures)
        return figures

    async def _settle(self, session: aiohttp.ClientSession, target: Target, rng: random.Random) -> None:
        """One request that is not counted: connections, caches and kernels of a server that idled for long."""
        request = Request("settle", 0.0, self.ids.prompt(rng, 32), 4)
        (answer,) = await run_workload(session, target, Workload("settle", (request,), 1), self.bounds.workload_seconds)
        if answer.error is not None:
            raise BenchError(f"{self.base_url} does not complete a request of 32 token ids: {answer.error}")
        await asyncio.sleep(_SETTLE_SECONDS)

    def report(self) -> Report:
        return Report(
            name=self.name,
            url=self.base_url,
            model=self.model or "",
            started_at=self.began.isoformat(timespec="seconds"),
            processor=_processor(),
            start_up_seconds=self.start_up_seconds,
            runs=tuple(self.runs),
        )


async def measure_all(
    measurements: Sequence[Measurement],
    workloads: Sequence[WorkloadName],
    rounds: int,
    rng: random.Random,
    on_run: Callable[[Measurement, WorkloadFigures], None],
) -> None:
    """Interleaved: in every round each workload runs on every server, in turns of alternating order."""
    reference = ReferenceStep()
    for round_number in range(rounds):
        order = list(measurements) if round_number % 2 == 0 else list(reversed(measurements))
        for workload in workloads:
            for measurement in order:
                on_run(measurement, await measurement.run(workload, rng, reference))


async def _peak_memory(pid: int | None, done: asyncio.Event) -> int | None:
    """The largest of regular samples until `done`."""
    peak: int | None = None
    while pid is not None:
        sample = await asyncio.to_thread(tree_pss_bytes, pid)
        if sample is not None:
            peak = max(peak or 0, sample)
        try:
            await asyncio.wait_for(done.wait(), _MEMORY_EVERY_SECONDS)
        except TimeoutError:
            continue
        break
    return peak


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

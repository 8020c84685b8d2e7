"""`hpu-engine bench` against a scripted server: exit codes, JSON, picture; several servers take turns."""

from __future__ import annotations

import asyncio
import random
import shlex
import signal
import sys
from pathlib import Path

import psutil
import pytest

from hpu_engine.bench.figures import WorkloadFigures
from hpu_engine.bench.measure import Measurement, measure_all
from hpu_engine.bench.report import Report
from hpu_engine.bench.workload import WorkloadName
from tests.bench.scripted_server import ScriptedServer, scripted


async def bench(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hpu_engine.cli", "bench", *arguments, stdout=-1, stderr=-1
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, out.decode(), err.decode()


async def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    async with scripted(ScriptedServer(0.02, 0.002)) as server:
        files = ("--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg"))
        code, out, err = await bench("--url", server.url, "--workloads", "a,single", *files)
    assert (code, "ITL" in out) == (0, True), err
    report = Report.model_validate_json((tmp_path / "r.json").read_text())
    assert [run.workload for run in report.runs] == ["a", "single"]
    assert [run.output_tokens for run in report.runs] == [32 * 128, 3 * 128]
    assert report.model == "scripted"
    for run in report.runs:
        assert run.memory_bytes is not None
        assert run.memory_bytes > 10_000_000
        assert all(milliseconds > 0 for milliseconds in run.reference_ms)
    assert (tmp_path / "r.svg").read_text().startswith("<?xml")


async def test_failed_requests_end_the_command_with_an_error() -> None:
    async with scripted(ScriptedServer(0.0, 0.0, fault="status")) as server:
        code, _, err = await bench("--url", server.url, "--workloads", "single")
    assert (code, "503" in err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--url", "localhost:80"), "HOST:PORT"),
        (("--workloads", "a,c"), "'c' is not a valid"),
        (("--prompt-ids", "9:3"), "LOW:HIGH"),
        (("--rounds", "0"), "--rounds"),
    ],
)
async def test_a_wrong_argument_is_named(arguments: tuple[str, str], named: str) -> None:
    code, _, err = await bench(*arguments)
    assert (code, named in err) == (2, True), err


async def test_two_servers_take_turns_in_alternating_order() -> None:
    turns: list[str] = []

    def note(measurement: Measurement, run: WorkloadFigures) -> None:
        turns.append(f"{measurement.name} {run.workload}")

    async with scripted(ScriptedServer(0.0, 0.0)) as first, scripted(ScriptedServer(0.0, 0.0)) as second:
        pair = [Measurement("ours", first.url), Measurement("peer", second.url)]
        await measure_all(pair, [WorkloadName.SINGLE], 2, random.Random(0), note)
    assert turns == ["ours single", "peer single", "peer single", "ours single"]
    assert [len(measurement.runs) for measurement in pair] == [2, 2]


async def test_a_bench_that_is_told_to_end_takes_its_server_along(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    server = f"import os, pathlib, time; pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(300)"
    start = shlex.join([sys.executable, "-c", server])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hpu_engine.cli", "bench", "--url", "http://127.0.0.1:9", "--start", start
    )
    async with asyncio.timeout(120):
        while not (mark.exists() and mark.read_text()):
            await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 128 + signal.SIGTERM
    assert not psutil.pid_exists(int(mark.read_text()))

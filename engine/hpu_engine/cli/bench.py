"""`hpu-engine bench`: load on any OpenAI-compatible server; figures as a table, JSON and a picture."""

from __future__ import annotations

import asyncio
import random
import shlex
import signal
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from hpu_engine.bench.client import BenchError
from hpu_engine.bench.figures import WorkloadFigures
from hpu_engine.bench.measure import Bounds, Measurement, measure_all
from hpu_engine.bench.memory import listener_of
from hpu_engine.bench.report import table
from hpu_engine.bench.workload import TokenIds, WorkloadName
from hpu_engine.contract import ExitCode

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ALL = "a,single,b"


@app.command(short_help="Measure any OpenAI-compatible server.")
def bench(
    *,
    url: Annotated[str, typer.Option(help="Server, up to and without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask for. Default: the first one listed.")] = None,
    workloads: Annotated[str, typer.Option(help="Which of a, single, b, separated by commas.")] = _ALL,
    rounds: Annotated[int, typer.Option(min=1, max=20, help="How often each workload runs.")] = 1,
    start: Annotated[
        str | None, typer.Option(help="Command that starts the server; its start-up is measured and it is ended again.")
    ] = None,
    start_seconds: Annotated[float, typer.Option(min=1, max=3600, help="Longest start-up.")] = 300.0,
    workload_seconds: Annotated[float, typer.Option(min=1, max=3600, help="Longest time of one workload.")] = 600.0,
    pid: Annotated[
        int | None, typer.Option(help="Root of the server's processes. Default: who listens on a loopback port.")
    ] = None,
    prompt_ids: Annotated[str, typer.Option(help="Prompts are random token ids between these two.")] = "1000:20000",
    name: Annotated[str, typer.Option(help="What to call the server in table and picture.")] = "server",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw a picture here (.png, .svg, .pdf).")] = None,
) -> None:
    """Measure output tokens per second, time to first token, inter-token latency, memory and start-up.

    a: 32 requests at once. single: one after another. b: 24 short ones, and long prompts arriving in between.
    """
    try:
        chosen = _workloads(workloads)
        measurement = Measurement(
            name=name,
            base_url=_base_url(url),
            model=model,
            pid=pid,
            ids=_token_ids(prompt_ids),
            bounds=Bounds(workload_seconds),
        )
        asyncio.run(_measure(measurement, chosen, rounds, start, start_seconds))
        report = measurement.report()
        if json_file is not None:
            json_file.write_text(report.model_dump_json(indent=2) + "\n")
        if plot_file is not None:
            from hpu_engine.bench.plot import plot

            plot((report,), plot_file)
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    except BenchError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.INTERNAL)
    from rich.console import Console

    Console().print(table((report,)))
    if report.failed:
        first = next(run.first_error for run in report.runs if run.first_error is not None)
        typer.echo(f"error: {report.failed} requests failed, the first with: {first}", err=True)
        sys.exit(ExitCode.INTERNAL)


async def _measure(
    measurement: Measurement, workloads: list[WorkloadName], rounds: int, start: str | None, start_seconds: float
) -> None:
    async with AsyncExitStack() as stack:
        if start is not None:
            from hpu_engine.bench.server_process import running

            log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpu-bench-"))) / "server.log"
            started = await stack.enter_async_context(
                running(shlex.split(start), measurement.base_url, log=log, limit_seconds=start_seconds)
            )
            measurement.pid, measurement.start_up_seconds = started.pid, started.start_up_seconds
        elif measurement.pid is None:
            measurement.pid = _local_pid(measurement.base_url)
        await measure_all([measurement], workloads, rounds, random.Random(), _say)  # noqa: S311 - prompts, no secrets


def _say(measurement: Measurement, run: WorkloadFigures) -> None:
    typer.echo(f"{measurement.name} {run.workload}: {run.output_tokens_per_second:.1f} output tokens/s", err=True)


def _local_pid(base_url: str) -> int | None:
    parts = urlsplit(base_url)
    return listener_of(parts.port or 80) if parts.hostname in _LOOPBACK else None


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise typer.BadParameter(f"{url!r} is no address; http://HOST:PORT is", param_hint="--url")
    return url.rstrip("/").removesuffix("/v1")


def _workloads(text: str) -> list[WorkloadName]:
    try:
        return [WorkloadName(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{error}; choose of {_ALL}", param_hint="--workloads") from None


def _token_ids(text: str) -> TokenIds:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high)):
        raise typer.BadParameter(f"{text!r} is no range; LOW:HIGH is, like 1000:20000", param_hint="--prompt-ids")
    return TokenIds(int(low), int(high))

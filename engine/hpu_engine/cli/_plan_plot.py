"""The plan as a picture: padding waste over shape space with the buckets drawn in, and warm-up memory by order.

matplotlib is imported on first use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpu_engine.planning.cards import GIB
from hpu_engine.planning.plan import Plan
from hpu_engine.planning.shapes.buckets import BucketSet
from hpu_engine.planning.shapes.lattice import doubling_lattice
from hpu_engine.planning.shapes.limits import Kind, Size
from hpu_engine.planning.shapes.step_cost import StepCost
from hpu_engine.planning.shapes.warm_up_plan import WarmUpPlan

_LABELS = {
    Kind.PREFILL: ("new tokens", "context blocks"),
    Kind.DECODE: ("decode rows", "KV blocks over all rows"),
}


class PlotError(RuntimeError):
    """The picture cannot be drawn."""


def draw_plan(plan: Plan, file: Path) -> None:
    """Write the picture to `file`, in the format of its suffix. Raises PlotError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("a plot needs matplotlib: install hpu-inference[plot], or leave --plot out") from error
    buckets, cost, warm_up = plan.settled.buckets, plan.settled.cost, plan.warm_up
    if buckets is None or warm_up is None:
        raise PlotError("there are no buckets to draw: on device cpu they are made with --force-buckets only")
    figure = Figure(figsize=(13, 9), layout="constrained")
    flat, prefill, decode, memory = figure.subplots(2, 2).flat
    _draw_flat(flat, buckets, cost)
    _draw_plane(figure, prefill, buckets, cost, Kind.PREFILL)
    _draw_plane(figure, decode, buckets, cost, Kind.DECODE)
    _draw_memory(memory, warm_up)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise PlotError(f"{file}: {error}") from error


def _waste(buckets: BucketSet, cost: StepCost, kind: Kind, size: Size) -> float:
    """Padded work over exact work, less one."""
    exact = cost.work_seconds(kind, size)
    return cost.work_seconds(kind, buckets.find(kind, *size).size) / exact - 1


def _draw_flat(axis: Any, buckets: BucketSet, cost: StepCost) -> None:
    tokens = range(1, buckets.limits.flat_tokens + 1)
    axis.plot(tokens, [100 * _waste(buckets, cost, Kind.FLAT, (n, 0)) for n in tokens], linewidth=0.8)
    for bucket in buckets.of(Kind.FLAT):
        axis.axvline(bucket.size[0], color="tab:red", linewidth=0.4)
    axis.set(xscale="log", xlabel="tokens in a step", ylabel="padding, % of exact work", title="flat part")


def _draw_plane(figure: Any, axis: Any, buckets: BucketSet, cost: StepCost, kind: Kind) -> None:
    limits = buckets.limits
    most_first, most_second = limits.largest(kind)
    firsts = doubling_lattice(most_first, steps=8)
    seconds = doubling_lattice(max(1, most_second), steps=8)
    grid = [
        [
            100 * _waste(buckets, cost, kind, (a, b)) if limits.can_emit(kind, (a - 1, b - 1), (a, b)) else float("nan")
            for a in firsts
        ]
        for b in seconds
    ]
    mesh = axis.pcolormesh(firsts, seconds, grid, vmin=0, vmax=200, cmap="viridis", shading="nearest")
    # Zero context has no place on a logarithmic axis: those buckets lie on the lower edge.
    sizes = [bucket.size for bucket in buckets.of(kind)]
    axis.scatter([a for a, _ in sizes], [max(b, 1) for _, b in sizes], s=9, color="tab:red", clip_on=False)
    axis.set(xscale="log", yscale="log", xlabel=_LABELS[kind][0], ylabel=_LABELS[kind][1], title=f"{kind} attention")
    figure.colorbar(mesh, ax=axis, label="padding, % of exact work (above 200 as 200)")


def _draw_memory(axis: Any, warm_up: WarmUpPlan) -> None:
    for name, memory in (
        ("largest first", warm_up.memory),
        ("smallest first", warm_up.ascending_memory),
    ):
        axis.plot([size / GIB for size in memory.reserved_bytes], label=name)
    axis.set(xlabel="recipes warmed", ylabel="reserved by the allocator, GiB", title="warm-up memory, by order")
    axis.legend()

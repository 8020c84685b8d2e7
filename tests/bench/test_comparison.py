"""Ratios between interleaved reports."""

from __future__ import annotations

from hpu_engine.bench.client import Answer
from hpu_engine.bench.figures import summarise
from hpu_engine.bench.report import Report
from tests.bench.__main__ import ratios


def report(name: str, *seconds: float, kind: str = "all", gap: float = 0.1) -> Report:
    """Runs of one answer that takes so many seconds; its two chunks are `gap` seconds apart."""
    runs = [summarise("a", [Answer(kind, 0.0, (0.1, 0.1 + gap), end, 1, 100)], (1.0, 1.0), None) for end in seconds]
    return Report(name=name, url="", model="", started_at="", processor="", start_up_seconds=None, runs=tuple(runs))


def test_medians_are_compared_and_the_spread_is_shown() -> None:
    (line,) = ratios(report("ours", 1.0, 2.0, 4.0), report("peer", 1.0, 1.0, 1.0), {"a": 0.6})
    assert "0.50 of peer's" in line
    assert "(0.25 to 1.00 over 3 rounds, asked for 0.60)" in line


def test_what_a_long_prompt_costs_short_requests_is_compared_too() -> None:
    ours, peer = report("ours", 1.0, kind="short", gap=0.2), report("peer", 1.0, kind="short", gap=0.8)
    assert "ours has 0.25 of peer's inter-token p99 of short requests" in ratios(ours, peer, {})[1]

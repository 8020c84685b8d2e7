"""Ratios between interleaved reports."""

from __future__ import annotations

from hpu_engine.bench.client import Answer
from hpu_engine.bench.figures import summarise
from hpu_engine.bench.report import Report
from tests.bench.__main__ import ratios


def report(name: str, *seconds: float) -> Report:
    runs = [summarise("a", [Answer("all", 0.0, (0.1,), end, 1, 100)], (1.0, 1.0), None) for end in seconds]
    return Report(name=name, url="", model="", started_at="", processor="", start_up_seconds=None, runs=tuple(runs))


def test_medians_are_compared_and_the_spread_is_shown() -> None:
    (line,) = ratios(report("ours", 1.0, 2.0, 4.0), report("peer", 1.0, 1.0, 1.0), {"a": 0.6})
    assert "0.50 of peer's" in line
    assert "(0.25 to 1.00 over 3 rounds, asked for 0.60)" in line

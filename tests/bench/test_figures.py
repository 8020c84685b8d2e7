"""Percentiles are the usual ones; a run survives the way to JSON and back; the table and the picture can be made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hpu_engine.bench.client import Answer
from hpu_engine.bench.figures import percentile, summarise
from hpu_engine.bench.plot import plot
from hpu_engine.bench.report import Report, table


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_equal_numpys(samples: list[float], percent: float) -> None:
    assert percentile(samples, percent) == pytest.approx(float(np.percentile(samples, percent)), rel=1e-9, abs=1e-6)


def test_nothing_measured_has_no_percentile() -> None:
    assert percentile([], 50) is None


def report() -> Report:
    answers = (
        Answer("short", 0.0, (0.1, 0.2, 0.4), 0.4, 4, 3),
        Answer("long", 1.0, (1.5,), 2.0, 9, 1),
        Answer("long", 1.0, (), 3.0, 0, 0, error="503: full"),
    )
    run = summarise("b", answers, (3.0, 4.0), 1_500_000_000)
    return Report(
        name="ours",
        url="http://127.0.0.1:1",
        model="m",
        started_at="2026-01-01T00:00:00+00:00",
        processor="p",
        start_up_seconds=2.5,
        runs=(run,),
    )


def test_a_failed_request_lengthens_the_run_and_adds_no_tokens() -> None:
    (run,) = report().runs
    assert (run.output_tokens, run.seconds, run.failed) == (4, 3.0, 1)
    short, long = run.kinds
    assert short.itl_samples_ms == pytest.approx((100.0, 200.0))
    assert long.requests == 1
    assert long.ttft_ms.p50 == pytest.approx(500.0)


def test_json_comes_back_equal_and_the_table_shows_every_kind(tmp_path: Path) -> None:
    first = report()
    assert Report.model_validate_json(first.model_dump_json()) == first
    console = Console(record=True, width=160, file=(tmp_path / "out").open("w"))
    console.print(table((first,)))
    text = console.export_text()
    for piece in ("short", "long", "1.3 (1 failed)", "1500", "3.0 / 4.0", "2.5 s"):
        assert piece in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    plot((report(), report()), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")

"""From answers to figures. Pure.

Output tokens/s: all output tokens over the time from the first request sent to the last answer finished. Time to first
token (TTFT): from sending to the first chunk with text. Inter-token latency (ITL): between two chunks with text, of all
requests together; a server that puts several tokens into a chunk shows a longer one.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from hpu_engine.bench.client import Answer


class Spread(BaseModel):
    """Percentiles in milliseconds. None: nothing was measured."""

    model_config = ConfigDict(frozen=True)

    p50: float | None
    p99: float | None


class KindFigures(BaseModel):
    """The requests of one kind. `samples` keep what the percentiles were taken of, for the plot (milliseconds)."""

    model_config = ConfigDict(frozen=True)

    kind: str
    requests: int
    ttft_ms: Spread
    itl_ms: Spread
    ttft_samples_ms: tuple[float, ...]
    itl_samples_ms: tuple[float, ...]


class WorkloadFigures(BaseModel):
    """One run of one workload. `reference_ms` is the fixed micro-step before and after it (see `reference`)."""

    model_config = ConfigDict(frozen=True)

    workload: str
    output_tokens_per_second: float
    output_tokens: int
    prompt_tokens: int
    seconds: float
    failed: int
    first_error: str | None
    kinds: tuple[KindFigures, ...]
    reference_ms: tuple[float, float]
    memory_bytes: int | None


def summarise(
    name: str, answers: Sequence[Answer], reference_ms: tuple[float, float], memory_bytes: int | None
) -> WorkloadFigures:
    """Failed requests count as failed and contribute no latency; their tokens are not counted."""
    good = [answer for answer in answers if answer.error is None]
    seconds = max(answer.finished_at for answer in answers) - min(answer.sent_at for answer in answers)
    tokens = sum(answer.tokens for answer in good)
    return WorkloadFigures(
        workload=name,
        output_tokens_per_second=tokens / seconds,
        output_tokens=tokens,
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        seconds=seconds,
        failed=len(answers) - len(good),
        first_error=next((answer.error for answer in answers if answer.error is not None), None),
        kinds=tuple(
            _kind(kind, [answer for answer in good if answer.kind == kind])
            for kind in dict.fromkeys(answer.kind for answer in answers)
        ),
        reference_ms=reference_ms,
        memory_bytes=memory_bytes,
    )


def _kind(kind: str, answers: Sequence[Answer]) -> KindFigures:
    ttft = [1000 * (answer.chunk_times[0] - answer.sent_at) for answer in answers if answer.chunk_times]
    itl = [
        1000 * (later - earlier)
        for answer in answers
        for earlier, later in zip(answer.chunk_times, answer.chunk_times[1:], strict=False)
    ]
    return KindFigures(
        kind=kind,
        requests=len(answers),
        ttft_ms=_spread(ttft),
        itl_ms=_spread(itl),
        ttft_samples_ms=tuple(round(sample, 3) for sample in ttft),
        itl_samples_ms=tuple(round(sample, 3) for sample in itl),
    )


def _spread(samples: Sequence[float]) -> Spread:
    return Spread(p50=percentile(samples, 50), p99=percentile(samples, 99))


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """With linear interpolation between the two nearest samples; None of nothing."""
    if not samples:
        return None
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

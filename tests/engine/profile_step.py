"""Where a step's time goes: `python -m tests.engine.profile_step [MODEL] --rows 32 --context 200`.

Prints CPU time of whole decode and chunk steps (thread time, so that a busy neighbour does not count), then the
operators of one of them by their own time. One thread unless OMP_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.profiler import ProfilerActivity, profile

from hpu_engine.config import EngineConfig
from hpu_engine.core.batch import build_batch
from hpu_engine.core.request import Request
from hpu_engine.core.sampler import Draw, sample
from hpu_engine.core.sampling_params import SamplingParams
from hpu_engine.core.scheduler import Row, Step
from hpu_engine.rank import open_rank
from tests.models.smollm2 import smollm2

GREEDY = SamplingParams(temperature=0.0)


def rows_of(count: int, context_len: int, new_len: int, block_size: int) -> Step:
    """`count` rows, each with blocks of its own; lengths differ by a few tokens like those of real requests."""
    rows, next_block = [], 1
    for index in range(count):
        context = max(0, context_len - index % 7)
        request = Request(str(index), [1 + index % 50] * (context + new_len), GREEDY, seed=0)
        needed = -(-(context + new_len) // block_size)
        request.blocks = list(range(next_block, next_block + needed))
        next_block += needed
        rows.append(Row(request, context, new_len, emits=True))
    return Step(tuple(rows))


def cpu_milliseconds(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Smallest and median thread time of `repeats` runs."""
    run()
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        run()
        times.append((time.thread_time() - started) * 1000)
    times.sort()
    return times[0], times[len(times) // 2]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--operators", type=int, default=15)
    chosen = parser.parse_args()
    blocks = chosen.rows * (chosen.context // 128 + 2) + 64
    rank = open_rank(
        EngineConfig(model=chosen.model or str(smollm2()), dtype=chosen.dtype, num_kv_blocks=blocks), lambda _: None
    )
    size = rank.runner.block_size

    def step(count: int, context: int, new: int) -> Callable[[], object]:
        work = rows_of(count, context, new, size)
        return lambda: rank.runner.execute(build_batch(work, size))

    decode = step(chosen.rows, chosen.context, 1)
    for name, run in {
        f"{chosen.rows} rows decoding": decode,
        "1 row decoding": step(1, chosen.context, 1),
        "a chunk of 256": step(1, 0, 256),
        "a chunk of 256 after 1792": step(1, 1792, 256),
    }.items():
        least, median = cpu_milliseconds(run, chosen.repeats)
        print(f"{name:32} {least:8.1f} ms least {median:8.1f} median")
    work = rows_of(chosen.rows, chosen.context, 1, size)
    print(f"batch building {cpu_milliseconds(lambda: build_batch(work, size), 20)[0]:.2f} ms")
    logits = torch.randn(chosen.rows, rank.runner.vocab)
    for name, params in {
        "greedy": GREEDY,
        "temperature": SamplingParams(),
        "top-p": SamplingParams(top_p=0.9),
        "top-k": SamplingParams(top_k=50),
    }.items():
        draws = [Draw(params, index, [1], 1) for index in range(chosen.rows)]
        took = cpu_milliseconds(lambda draws=draws: sample(logits.clone(), draws), 3)[0]  # type: ignore[misc]
        print(f"sampling, {name:12} {took:.2f} ms")
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        decode()
    averages = profiled.key_averages()
    print(averages.table(sort_by="self_cpu_time_total", row_limit=chosen.operators, max_name_column_width=40))


if __name__ == "__main__":
    main()

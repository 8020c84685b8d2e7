"""A step with one core taken by somebody else: `python -m tests.engine.neighbour [MODEL] [--rows 32]`.

Alternates decode steps on a quiet machine with steps beside a busy process of this script, and prints medians of wall
time and their ratio: at most 1.5 for one row and 2.5 for many are asked for. Only a machine with nothing else to do
gives figures that mean anything, so the load before the start is printed too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpu_engine.worker.threads import apply_thread_policy

ASKED = {1: 1.5, 32: 2.5}
TURNS = 6
STEPS_PER_TURN = 5


@contextmanager
def busy_neighbour() -> Iterator[None]:
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def wall_milliseconds(run: Callable[[], object], count: int) -> list[float]:
    run()
    times = []
    for _ in range(count):
        started = time.monotonic()
        run()
        times.append((time.monotonic() - started) * 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--kernels", choices=["auto", "torch"], default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ASKED))
    parser.add_argument("--context", type=int, default=200)
    chosen = parser.parse_args()
    apply_thread_policy()
    import torch

    from hpu_engine.settings.engine import EngineConfig
    from hpu_engine.worker.start_up import open_rank
    from tests.engine.rows import rows_of, run_step
    from tests.models.smollm2 import smollm2

    blocks = max(chosen.rows) * (chosen.context // 128 + 2)
    model = chosen.model or str(smollm2())
    config = EngineConfig(model=model, num_kv_blocks=blocks, kernels=chosen.kernels, compile=chosen.compile)
    rank = open_rank(config, lambda _: None)
    print(f"{torch.get_num_threads()} threads, load before the start {os.getloadavg()[0]:.1f}")
    with torch.inference_mode():
        for count in chosen.rows:
            step = rows_of(count, chosen.context, 1, rank.runner.shapes.block_size)
            quiet: list[float] = []
            beside: list[float] = []
            for _ in range(TURNS):
                quiet += wall_milliseconds(lambda step=step: run_step(rank.runner, step), STEPS_PER_TURN)  # type: ignore[misc]
                with busy_neighbour():
                    beside += wall_milliseconds(lambda step=step: run_step(rank.runner, step), STEPS_PER_TURN)  # type: ignore[misc]
            before, after = statistics.median(quiet), statistics.median(beside)
            asked = f" (asked for: at most {ASKED[count]})" if count in ASKED else ""
            ratio = f"ratio {after / before:.2f}{asked}"
            print(f"{count:3} rows: quiet {before:.1f} ms, with a neighbour {after:.1f} ms, {ratio}")


if __name__ == "__main__":
    main()

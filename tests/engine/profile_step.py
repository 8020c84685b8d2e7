"""Where a step's time goes: `python -m tests.engine.profile_step [MODEL] --rows 32 --context 200`.

Prints CPU time of whole decode and chunk steps (thread time, so that a busy neighbour does not count), the parts of
decode steps and of a chunk, and what scheduler and batch building take beside a step of `--rows` running requests. One
thread unless OMP_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as a worker sets it

import torch

from hpu_engine.device.cpu.attention import _FusedChunk
from hpu_engine.device.cpu.device import CpuDevice
from hpu_engine.device.cpu.kv_cache import LayerPages
from hpu_engine.device.cpu.torch_ops import CpuOps
from hpu_engine.model import runner as runner_module
from hpu_engine.model.transformer import DenseMlp, FusedMlp, Layer, Transformer
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Step
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.step import loop as loop_module
from hpu_engine.step.batch import build_batch
from hpu_engine.step.input import input_of
from hpu_engine.step.sampler import Draw, sample
from hpu_engine.wire.messages import Submit
from hpu_engine.worker.start_up import Rank, open_rank
from tests.engine.rows import GREEDY, rows_of, run_step
from tests.models.smollm2 import smollm2


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


class Parts:
    """CPU time by part of a step: wraps the callables of a transformer."""

    def __init__(self, transformer: Transformer) -> None:
        self.seconds: dict[str, float] = {}
        self.transformer = replace(
            transformer,
            embedding=self.timed("embedding", transformer.embedding),
            lm_head=self.timed("lm head", transformer.lm_head),
            layers=tuple(self._layer(layer) for layer in transformer.layers),
        )

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            started = time.thread_time()
            result = call(*arguments, **named)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - started
            return result

        return run

    def _layer(self, layer: Layer) -> Layer:
        mlp = layer.mlp
        if isinstance(mlp, DenseMlp):
            mlp = DenseMlp(self.timed("gate and up", mlp.gate_up), self.timed("down", mlp.down), self.ops(mlp.ops))  # type: ignore[arg-type]
        else:
            mlp = self.timed("MLP" if isinstance(mlp, FusedMlp) else "experts", mlp)
        return replace(
            layer, qkv=self.timed("qkv", layer.qkv), output=self.timed("attention output", layer.output), mlp=mlp
        )

    def ops(self, ops: CpuOps) -> CpuOps:
        timed: Any = SimpleNamespace(
            add_norm=self.timed("norms", ops.add_norm),
            silu_mul=self.timed("gates", ops.silu_mul),
            rotate=self.timed("rotation", ops.rotate),
            write=self.timed("KV writes", ops.write),
            begin=self.timed("KV clearing", ops.begin),
        )

        def singles(*arguments: Any) -> Any:
            prepared = self.timed("attention indices", ops.singles)(*arguments)
            return SimpleNamespace(attend=self.timed("attention of singles", prepared.attend))

        def chunk(*arguments: Any) -> Any:
            prepared = self.timed("attention indices", ops.chunk)(*arguments)
            return prepared and SimpleNamespace(attend=self.timed("attention of chunks", prepared.attend))

        timed.singles, timed.chunk = singles, chunk
        return timed  # type: ignore[no-any-return]


def print_parts(rank: Rank, step: Step, repeats: int) -> None:
    parts = Parts(rank.runner.transformer)
    runner = replace(rank.runner, transformer=parts.transformer)
    assert isinstance(rank.device, CpuDevice)
    with (
        patch.object(rank.device, "_ops", parts.ops(rank.device.ops)),
        patch.object(_FusedChunk, "attend", parts.timed("attention of chunks", _FusedChunk.attend)),
        patch.object(LayerPages, "clear", parts.timed("KV clearing", LayerPages.clear)),
    ):
        run_step(runner, step)
        parts.seconds.clear()
        started = time.thread_time()
        for _ in range(repeats):
            run_step(runner, step)
        whole = (time.thread_time() - started) / repeats * 1000
    own = {name: seconds / repeats * 1000 for name, seconds in parts.seconds.items()}
    own["between them"] = whole - sum(own.values())
    for name, milliseconds in sorted(own.items(), key=lambda item: -item[1]):
        print(f"  {name:24} {milliseconds:8.2f} ms {milliseconds / whole:6.1%}")


def print_scheduling(rank: Rank, rows: int) -> None:
    """Scheduler and batch building beside the step they belong to, `rows` requests running.

    Their contexts are short, which makes the step cheap and the share, if anything, too large.
    """
    prompt = tuple(range(1, 16))
    loop = rank.loop
    for number in range(rows):
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        loop.submit(Submit(request_id=f"s{number}", prompt_token_ids=(number + 1, *prompt), params=params))
    while loop.scheduler.num_waiting or loop.step().num_tokens != rows:
        loop.step()
    scheduler, spent = loop.scheduler, [0.0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = time.thread_time()
            result = call(*arguments)
            spent[0] += time.thread_time() - started
            return result

        return run

    shares = []
    with (
        patch.object(scheduler, "schedule", counted(scheduler.schedule)),
        patch.object(scheduler, "commit", counted(scheduler.commit)),
        patch.object(loop_module, "input_of", counted(input_of)),
        patch.object(runner_module, "build_batch", counted(build_batch)),
    ):
        for _ in range(10):
            spent[0] = 0.0
            started = time.thread_time()
            loop.step()
            shares.append((spent[0] / (time.thread_time() - started), spent[0] * 1000))
    share, milliseconds = sorted(shares)[len(shares) // 2]
    print(f"scheduler and batch building at {rows} running requests: {milliseconds:.2f} ms, {share:.1%} of a step")
    loop.abort([f"s{number}" for number in range(rows)])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", choices=["auto", "torch"], default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    most = max(chosen.rows, 64)
    config = EngineConfig(
        model=chosen.model or str(smollm2()),
        dtype=chosen.dtype,
        num_kv_blocks=most * (chosen.context // 128 + 2),
        max_num_seqs=most,
        kernels=chosen.kernels,
        compile=chosen.compile,
        exact=chosen.exact,
    )
    started = time.process_time()
    rank = open_rank(config, lambda _: None)
    print(f"loading took {time.process_time() - started:.1f} s of CPU time")
    size = rank.runner.shapes.block_size

    def step(count: int, context: int, new: int) -> Callable[[], object]:
        work = rows_of(count, context, new, size)
        return lambda: run_step(rank.runner, work)

    for name, run in {
        f"{chosen.rows} rows decoding": step(chosen.rows, chosen.context, 1),
        "1 row decoding": step(1, chosen.context, 1),
        "a chunk of 256": step(1, 0, 256),
        "a chunk of 256 after 1792": step(1, 1792, 256),
    }.items():
        least, median = cpu_milliseconds(run, chosen.repeats)
        print(f"{name:32} {least:8.1f} ms least {median:8.1f} median")
    for name, work in {
        f"a step of {chosen.rows} rows": rows_of(chosen.rows, chosen.context, 1, size),
        "a step of 1 row": rows_of(1, chosen.context, 1, size),
        "a chunk of 256": rows_of(1, 0, 256, size),
    }.items():
        print(f"parts of {name}")
        print_parts(rank, work, chosen.repeats)
    print_scheduling(rank, most)
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


if __name__ == "__main__":
    main()

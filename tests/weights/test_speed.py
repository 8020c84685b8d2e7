"""Loading keeps up with the disk: at most twice the processor time of reading the same file into memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from hpu_engine.model.weights.loading import load_parameters
from hpu_engine.model.weights.name_table import NameTable, expand
from hpu_engine.planning import read_model_description
from tests.models.upcycled import smollm2_ernie_moe

ROUNDS = 4


def test_loading_costs_at_most_twice_a_plain_sequential_read() -> None:
    """Both from the page cache, in turns, the best of each: the disk is the same for both and would hide the rest.

    Both keep what they read: on virtual machines touching new memory costs more than copying into it. What counts is
    processor time: how long each has to wait for a core is the neighbours' matter.
    """
    directory = smollm2_ernie_moe()
    table = expand(read_model_description(directory))
    file = directory / "model.safetensors"
    plain: list[tuple[float, float]] = []
    loading: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        plain.append(_seconds(file.read_bytes))
        loading.append(_seconds(lambda: _load(directory, table)))
    gigabytes = file.stat().st_size / 1e9
    for name, rounds in (("plain read", plain), ("loading", loading)):
        elapsed, spent = (min(times) for times in zip(*rounds, strict=True))
        print(f"{name}: {gigabytes / elapsed:.2f} GB/s, {spent / gigabytes:.2f} s of processor time a GB")
    assert min(spent for _, spent in loading) <= 2 * min(spent for _, spent in plain)


def _load(directory: Path, table: NameTable) -> dict[str, torch.Tensor]:
    return dict(load_parameters(directory, table, torch.bfloat16, lambda _done, _total: None))


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Elapsed, and spent by the processor."""
    started, cpu = time.perf_counter(), time.process_time()
    held = work()
    seconds = time.perf_counter() - started, time.process_time() - cpu
    del held
    return seconds

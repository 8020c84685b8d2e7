"""`--compile`: built once, kept on disk, refused with a sentence, nothing built while serving, the same tokens."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hpu_engine.contract import FailureReason, Phase
from hpu_engine.device.cpu.native import build
from hpu_engine.device.cpu.native.build import NativeBuildFailed, load_library
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.wire.messages import Progress
from hpu_engine.worker.start_up import Rank, StartUpError, open_rank
from tests.engine.direct import open_quietly, run_together
from tests.engine.test_greedy_parity import assert_is_greedy, reference_of
from tests.engine.trace import Schedule, first_difference, one_at_a_time, random_trace, replay
from tests.models.smollm2 import smollm2
from tests.models.tiny import VOCAB_SIZE, tiny

BLOCK = 16


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds that do not optimise: how they are kept is what counts here."""
    monkeypatch.setattr(build, "FLAGS", (*(flag for flag in build.FLAGS if flag != "-O3"), "-O0"))


def compiled(family: str, **more: object) -> Rank:
    settings = {"block_size": BLOCK, "num_kv_blocks": 40, "dtype": "float32", "compile": True, **more}
    return open_quietly(EngineConfig(model=str(tiny(family)), **settings))  # type: ignore[arg-type]


def test_a_library_is_built_once_and_then_found_without_a_compiler(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library(tmp_path / "kernels", pytest.fail)
    (kept,) = (tmp_path / "kernels").iterdir()
    before = kept.stat().st_mtime_ns
    monkeypatch.setenv("PATH", str(tmp_path))
    load_library(tmp_path / "kernels", pytest.fail)
    assert kept.stat().st_mtime_ns == before


def test_another_processor_or_source_or_flag_has_a_library_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {build._digest()}
    with monkeypatch.context() as patch:
        patch.setattr(build, "_processor", lambda: "another")
        names.add(build._digest())
    with monkeypatch.context() as patch:
        patch.setattr(build, "FLAGS", ("-O1",))
        names.add(build._digest())
    with monkeypatch.context() as patch:
        (tmp_path / "linear.cpp").write_text("int changed;")
        patch.setattr(build, "_HERE", tmp_path)
        names.add(build._digest())
    assert len(names) == 4


def test_a_damaged_library_is_built_anew(quick: None, tmp_path: Path) -> None:
    (tmp_path / f"{build._digest()}.so").write_bytes(b"half of a library")
    assert load_library(tmp_path, pytest.fail).hpu_linear_float32


def test_a_folder_that_cannot_be_written_is_a_warning(quick: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said: list[str] = []
    assert load_library(tmp_path / "file" / "cache", said.append).hpu_linear_float32
    assert len(said) == 1
    assert "cannot be kept in" in said[0]
    assert "built at every start" in said[0]


def test_a_disk_that_fills_up_while_building_is_a_warning(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = build._compile

    def full(to: Path, flags: Sequence[str]) -> None:
        if tmp_path in to.parents:
            raise NativeBuildFailed("g++ failed with exit code 1: No space left on device")
        real(to, flags)

    monkeypatch.setattr(build, "_compile", full)
    said: list[str] = []
    assert load_library(tmp_path / "cache", said.append).hpu_linear_float32
    assert "No space left on device" in said[0]
    assert list((tmp_path / "cache").iterdir()) == [], "half of a build is left behind"


def test_without_a_compiler_the_start_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartUpError, match=r"--compile needs g\+\+, which is not in PATH; install it") as refused:
        compiled("llama", compile_cache=str(tmp_path / "cache"))
    assert refused.value.reason is FailureReason.USAGE


def test_what_the_compiler_objects_to_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", ("-no-such-flag",))
    with pytest.raises(NativeBuildFailed, match=r"failed with exit code \d+: .*no-such-flag"):
        load_library(tmp_path, lambda _: None)


def test_building_is_told_before_it_begins(tmp_path: Path) -> None:
    told: list[Progress] = []
    config = EngineConfig(model=str(tiny("llama")), num_kv_blocks=8, compile=True)
    open_rank(config, told.append)
    assert told[0].phase is Phase.STARTING
    assert told[0].current == "compiling kernels"


def test_nothing_is_built_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = compiled("llama")
    rank.warm_up(lambda _progress: None)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something is compiled after the warm-up")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(torch, "compile", refuse)
    found = replay(rank, random_trace(3, VOCAB_SIZE, BLOCK), Schedule(budget=50, num_blocks=40))
    assert any(found.tokens.values())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "ernie4_5"])
def test_every_family_gives_the_greedy_tokens_of_transformers(family: str) -> None:
    rank = compiled(family, max_num_batched_tokens=96)
    asked = [[3 + (7 * number + 11 * i) % 300 for i in range(length)] for number, length in enumerate((1, 2, 17, 150))]
    reference = reference_of(str(tiny(family)))
    for prompt, output in zip(
        asked, run_together(rank, asked, SamplingParams(max_tokens=40, temperature=0.0)), strict=True
    ):
        assert_is_greedy(reference, prompt, output)


@pytest.mark.timeout(1200)
def test_a_real_model_gives_the_greedy_tokens_of_transformers() -> None:
    path = str(smollm2())
    rank = open_quietly(EngineConfig(model=path, dtype="float32", num_kv_blocks=24, compile=True))
    asked = [[100 + (i * 37 + n) % 40000 for i in range(length)] for n, length in enumerate((1, 5, 127, 129, 200))]
    outputs = run_together(rank, asked, SamplingParams(max_tokens=24, temperature=0.0))
    reference = reference_of(path)
    for prompt, output in zip(asked, outputs, strict=True):
        assert_is_greedy(reference, prompt, output)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_with_exact_no_schedule_changes_a_bit(family: str) -> None:
    rank = compiled(family, exact=True)
    for seed in range(2):
        asked = random_trace(seed, VOCAB_SIZE, BLOCK)
        expected = one_at_a_time(rank, asked, num_blocks=40)
        longest = max(len(one.prompt) + one.params.max_tokens for one in asked)
        for schedule in (
            Schedule(budget=BLOCK * 4, num_blocks=40),
            Schedule(budget=BLOCK + 1, num_blocks=-(-longest // BLOCK) + 1),
        ):
            difference = first_difference(expected, replay(rank, asked, schedule))
            assert difference is None, f"trace {seed}, {schedule}: {difference}"

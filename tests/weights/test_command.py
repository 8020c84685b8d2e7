"""`hpu-engine weights` shows what goes where, and refuses what cannot be served."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpu_engine.cli import main
from tests.models.tiny import tiny


def weights(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["weights", *arguments])
    return result.exit_code, result.output


def line(text: str, *words: str) -> str:
    (found,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return " ".join(found.split())


def test_one_line_per_kind_and_what_a_worker_reads() -> None:
    model = str(tiny("ernie4_5_moe"))
    code, text = weights("--model", model)
    assert code == 0
    assert "reads 1,106,272 of 1,106,272 bytes" in text
    assert "layers.*.experts.*.gate_up [32:]"[:26] in line(text, "experts.*.up_proj")
    assert "one axis" in line(text, "e_score_correction_bias")


def test_shards_are_shown_for_one_worker() -> None:
    model = str(tiny("ernie4_5_moe"))
    parallel = ("--tensor-parallel-size", "2", "--expert-parallel-size", "2")
    code, text = weights("--model", model, *parallel, "--worker", "1")
    assert code == 0
    assert "[:, 32:64]" in line(text, "o_proj")
    assert "[160:320, :]" in line(text, "embed_tokens")
    assert "whole experts" in line(text, "experts.*.down_proj", "another worker's")
    code, every = weights("--model", model, *parallel, "--worker", "1", "--all")
    assert "another worker's" in line(every, "layers.1.mlp.experts.3.down_proj")
    assert "layers.1.experts.4.down" in line(every, "layers.1.mlp.experts.4.down_proj")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--tensor-parallel-size", "3"), 2, "does not divide"),
        (("--data-parallel-size", "3", "--expert-parallel-size", "3"), 2, "nearest valid"),
        (("--worker", "1"), 2, "workers 0 to 0"),
    ],
)
def test_a_wrong_layout_is_refused(arguments: tuple[str, ...], code: int, said: str) -> None:
    got, text = weights("--model", str(tiny("ernie4_5_moe")), *arguments)
    assert (got, said in text) == (code, True), text


def test_a_broken_checkpoint_ends_with_the_models_exit_code(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    (directory / "model.safetensors").write_bytes(b"\0" * 100)
    code, text = weights("--model", str(directory))
    assert (code, "model.safetensors" in text) == (3, True), text

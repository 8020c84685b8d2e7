"""A built checkpoint is complete or absent, built once, and never written over."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.models.__main__ import main
from tests.models.store import cached, staged


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_failed_build_leaves_nothing_and_the_next_one_succeeds(cache: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached("thing", fail)
    assert list((cache / "models").iterdir()) == []
    built = cached("thing", lambda directory: (directory / "whole").touch())
    assert [file.name for file in built.iterdir()] == ["whole"]


def test_parallel_callers_build_once(cache: Path) -> None:
    builds: list[Path] = []
    barrier = threading.Barrier(4)

    def call() -> None:
        barrier.wait()
        cached("thing", builds.append)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def test_a_directory_that_holds_something_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").write_text("x")
    with pytest.raises(OSError), staged(tmp_path / "target"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_the_command_writes_once_says_so_again_and_refuses_a_foreign_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    assert main(["tiny-llama", str(target)]) == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in target.iterdir()}
    assert main(["tiny-llama", str(target)]) == 0
    assert capsys.readouterr().out.endswith("is complete\n")
    (target / "config.json").unlink()
    assert main(["tiny-llama", str(target)]) == 2
    assert "new or empty" in capsys.readouterr().err

"""Two checkouts on one cache: each has images of its own, and what one builds takes nothing from the other."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.images import build, seed, store
from tests.images.build import Image
from tests.images.pruning import KEPT_VERSIONS
from tests.images.store import Store

BLOBS = Path("io.containerd.content.v1.content/blobs/sha256")


def test_each_checkout_finds_what_it_built_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Store(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(build, "ROOT", tmp_path / name)
        build._record(shared, {"operator": Image("operator", f"localhost/operator:{name}", "")})
    assert build.recorded(shared)["operator"].reference == "localhost/operator:two"
    assert build._in_records(shared) == {"localhost/operator:one", "localhost/operator:two"}
    monkeypatch.setattr(build, "ROOT", tmp_path / "one")
    assert build.recorded(shared)["operator"].reference == "localhost/operator:one"
    # What a checkout that is gone had built holds nothing any longer.
    (tmp_path / "two").rmdir()
    build._record(shared, build.recorded(shared))
    assert build._in_records(shared) == {"localhost/operator:one"}


@pytest.fixture
def unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A containerd folder without a containerd."""

    def unpack(_: Store, images: Sequence[Image], root: Path, *__: object) -> None:
        (root / BLOBS).mkdir(parents=True, exist_ok=True)
        (root / "io.containerd.metadata.v1.bolt").mkdir(exist_ok=True)
        (root / "io.containerd.metadata.v1.bolt" / "meta.db").write_text(images[0].reference)

    monkeypatch.setattr(seed, "_import", unpack)


def images(version: int) -> list[Image]:
    return [Image("operator", f"localhost/operator:{version}", f"sha256:{version}")]


@pytest.mark.usefixtures("unpacking")
def test_of_what_was_unpacked_the_last_stay(tmp_path: Path) -> None:
    shared = Store(tmp_path / "cache")
    made = [seed.prepare(shared, images(version), tmp_path) for version in range(KEPT_VERSIONS)]
    # The first is asked for again, so the second is the oldest.
    time.sleep(0.01)
    assert seed.prepare(shared, images(0), tmp_path) == made[0]
    made.append(seed.prepare(shared, images(KEPT_VERSIONS), tmp_path))
    assert {path for path in made if path.exists()} == set(made) - {made[1]}
    assert seed.place(shared, images(0), tmp_path / "node")
    assert (tmp_path / "node/io.containerd.metadata.v1.bolt/meta.db").read_text() == "localhost/operator:0"
    assert seed.place(shared, images(1), tmp_path / "other") is False


@pytest.mark.usefixtures("unpacking")
def test_a_copy_that_loses_its_original_is_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Store(tmp_path / "cache")
    made = seed.prepare(shared, images(0), tmp_path)
    run = subprocess.run

    def removed_meanwhile(*arguments: object, **options: object) -> object:
        done = run(*arguments, **options)  # type: ignore[call-overload]
        shutil.rmtree(made)
        return done

    monkeypatch.setattr(subprocess, "run", removed_meanwhile)
    assert seed.place(shared, images(0), tmp_path / "node") is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def test_a_long_step_says_that_it_is_at_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "HEARTBEAT_SECONDS", 0.05)
    with store.step("something"):
        time.sleep(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "images: something ..."
    assert lines[1].startswith("images: something: at work for")

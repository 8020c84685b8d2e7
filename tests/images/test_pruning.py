"""Old versions of images go, the current ones and the cache of their steps stay."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.images import pruning
from tests.images.buildah import Buildah
from tests.images.pruning import Plan, Stored, Use, note_use, plan, prune, stored
from tests.images.store import Store


def version(number: int, *names: str) -> Stored:
    return Stored(f"{number:02x}".ljust(64, "0"), names, created=float(number))


def test_of_each_image_the_versions_used_last_stay() -> None:
    images = [version(number, f"h/a:{number}") for number in range(5)] + [version(9, "h/b:9")]
    # The oldest is used again: it counts as the newest.
    assert plan(images, {"h/a:0": Use(at=100.0)}, pinned=(), keep=2).versions == ("h/a:3", "h/a:2", "h/a:1")


def test_what_is_current_stays_however_old_it_is() -> None:
    images = [version(number, f"h/a:{number}") for number in range(5)]
    assert plan(images, {}, pinned={"h/a:1"}, keep=2).versions == ("h/a:2", "h/a:0")


def test_a_second_name_goes_alone_while_the_first_is_kept() -> None:
    images = [version(1, "h/a:old", "h/a:new"), version(2, "h/a:newer")]
    going = plan(images, {"h/a:new": Use(at=50.0), "h/a:newer": Use(at=60.0)}, pinned=(), keep=2)
    assert going == Plan(versions=("h/a:old",), steps=())


def test_steps_stay_that_a_kept_version_went_through() -> None:
    steps = [version(number) for number in (11, 12, 13)]
    images = [*steps, version(20, "h/a:20"), version(21, "h/a:21")]
    uses = {"h/a:20": Use(20.0, (steps[0].name,)), "h/a:21": Use(21.0, (steps[2].name[:11],))}
    going = plan(images, uses, pinned=(), keep=1)
    assert going.versions == ("h/a:20",)
    assert going.steps == (images[3].name, steps[1].name, steps[0].name)


@pytest.fixture
def buildah(tmp_path: Path) -> Buildah:
    if os.geteuid() != 0:
        pytest.skip("building images needs root: it makes mounts")
    return Buildah.on(Store(tmp_path / "store"))


def build(buildah: Buildah, context: Path, number: int) -> str:
    """Version `number` of an image of one program: a step that all have in common, and two of its own."""
    busybox = shutil.which("busybox")
    assert busybox
    context.mkdir(exist_ok=True)
    if not (context / "busybox").exists():
        shutil.copy(busybox, context)
    (context / "file").write_text(str(number))
    (context / "Dockerfile").write_text("FROM scratch\nCOPY busybox /busybox\nCOPY file /file\nLABEL a=b\n")
    reference = f"localhost/hpu/a:{number}"
    said = buildah.run("a version", "build", "--layers", "--tag", reference, context)
    note_use(buildah.store, reference, said)
    return said


def test_a_storage_is_freed_of_old_versions_and_says_so(
    buildah: Buildah, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = buildah.store
    for number in range(6):
        build(buildah, tmp_path / "context", number)
    held = buildah.run("a container of another process", "from", "--pull-never", "localhost/hpu/a:2")
    abandoned = buildah.run("a container of a killed one", "from", "--pull-never", "localhost/hpu/a:1")
    containers = store.storage / "overlay-containers" / "containers.json"
    entries = json.loads(containers.read_text())
    for entry in entries:
        if entry["names"] == [abandoned]:
            entry["created"] = "2020-01-01T00:00:00.123456789Z"
    containers.write_text(json.dumps(entries))

    prune(store, buildah, pinned={"localhost/hpu/a:0"})
    names = sorted(name for image in stored(store) for name in image.names)
    assert names == [f"localhost/hpu/a:{number}" for number in (0, 2, 3, 4, 5)]
    said = capsys.readouterr().err
    assert "localhost/hpu/a:2 is in use" in said
    assert "removed 1 old versions (a:1)" in said
    assert [entry["names"] for entry in json.loads(containers.read_text())] == [[held]]

    buildah.run("the end of the other process", "rm", held)
    prune(store, buildah, pinned={"localhost/hpu/a:0"})
    assert not buildah.has("localhost/hpu/a:2")
    # What is kept is kept with its cache, and what has gone has gone with its own.
    assert build(buildah, tmp_path / "context", 5).count("Using cache") == 3
    assert build(buildah, tmp_path / "context", 2).count("Using cache") == 1
    layers = json.loads((store.storage / "overlay-layers" / "layers.json").read_text())
    assert len(layers) == 1 + len((0, 3, 4, 5, 2))


def test_what_is_much_goes_little_by_little(buildah: Buildah, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_AT_ONCE", 1)
    for number in range(5):
        build(buildah, tmp_path / "context", number)
    for kept in (4, 3):
        prune(buildah.store, buildah, pinned=())
        assert sum(len(image.names) for image in stored(buildah.store)) == kept


def test_with_nothing_to_remove_nothing_is_called_or_said(
    buildah: Buildah, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(buildah, tmp_path / "context", 1)
    capsys.readouterr()

    def refuse(*_: object) -> str:
        raise AssertionError("buildah was called")

    monkeypatch.setattr(Buildah, "run", refuse)
    assert prune(buildah.store, buildah, pinned=()) == Plan((), ())
    assert capsys.readouterr().err == ""

"""The images of this checkout, built once for the session (and not at all when they are in the cache)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import identify
from tests.images.build import ROOT, Image, build
from tests.images.buildah import Buildah
from tests.images.layout import Layout
from tests.images.store import Store


@pytest.fixture(scope="session")
def store() -> Store:
    if os.geteuid() != 0:
        pytest.skip("building images needs root: it makes mounts")
    return Store.default()


@pytest.fixture
def own(store: Store, images: dict[str, Image]) -> Iterator[Store]:
    """A set of images apart from the one that clusters use, on the same layers: a test may change it."""
    _remove_sets_of_the_dead(store)
    own = Store(store.folder, f"-test-{os.getpid()}")
    try:
        with store.locked():  # a build of another checkout may remove what it keeps no longer
            _link_layers(Layout(store.layout), Layout(own.layout))
        yield own
    finally:
        _remove_set(own)


def _link_layers(source: Layout, target: Layout) -> None:
    """What is in the other layout need not be taken out of buildah's storage again."""
    blobs = Path("blobs", "sha256")
    (target.folder / blobs).mkdir(parents=True)
    for blob in (source.folder / blobs).iterdir():
        (target.folder / blobs / blob.name).hardlink_to(blob)
    for name in ("index.json", "layers.json"):
        shutil.copy(source.folder / name, target.folder)


def _remove_set(own: Store) -> None:
    shutil.rmtree(own.layout, ignore_errors=True)
    own.record.unlink(missing_ok=True)


def _remove_sets_of_the_dead(store: Store) -> None:
    for path in store.folder.glob("oci-test-*"):
        if identify(int(path.name.rpartition("-")[2])) is None:
            _remove_set(Store(store.folder, path.name.removeprefix("oci")))


@pytest.fixture(scope="session")
def buildah(store: Store) -> Buildah:
    return Buildah.on(store)


def _copy(source: Path, target: Path) -> Path:
    for name in (".dockerignore", "Dockerfile", "LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(source / name, target)
    for name in ("engine", "images", "operator", "requirements"):
        shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.fixture(scope="session")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the images are made from, as it was when the session began."""
    return _copy(ROOT, tmp_path_factory.mktemp("snapshot"))


@pytest.fixture(scope="session")
def images(store: Store, snapshot: Path) -> dict[str, Image]:
    return build(store=store, root=snapshot)


@pytest.fixture
def checkout(snapshot: Path, tmp_path: Path) -> Path:
    """A copy of the snapshot, to change."""
    return _copy(snapshot, tmp_path)

"""The images of this checkout, built once for the session (and not at all when they are in the cache)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.images.build import ROOT, Image, build
from tests.images.buildah import Buildah
from tests.images.store import Store


@pytest.fixture(scope="session")
def store() -> Store:
    if os.geteuid() != 0:
        pytest.skip("building images needs root: it makes mounts")
    return Store.default()


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

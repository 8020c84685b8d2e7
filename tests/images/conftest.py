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


@pytest.fixture(scope="session")
def images(store: Store) -> dict[str, Image]:
    return build(store=store)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the images are made from, to change."""
    for name in (".dockerignore", "Dockerfile", "LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("engine", "images", "operator", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path

"""The cache of built checkpoints: one directory per name, complete or absent.

A directory is built beside its final place and renamed into it, under a lock per name, so that parallel test runs build
it once and an interrupted build leaves nothing that looks finished. `HPU_CACHE` moves the cache.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.machine import cache_folder


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The directory `name` of the cache, made by `build(empty_directory)` where it is not there yet."""
    target = cache_folder() / "models" / name
    if target.is_dir():
        return target
    with _lock(name):
        if not target.is_dir():
            with staged(target) as directory:
                build(directory)
    return target


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """An empty directory that becomes `target` when the block ends well, and vanishes when it does not.

    `target` must not exist, or be an empty directory.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield directory
        directory.chmod(0o755)
        for file in (path for path in directory.rglob("*") if path.is_file()):
            file.chmod(0o644)  # a container's user reads it, whoever wrote it
        directory.rename(target)  # rename(2) replaces an empty directory and refuses any other
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _lock(name: str) -> Iterator[None]:
    path = cache_folder() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

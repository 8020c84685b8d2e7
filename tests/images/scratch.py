"""A folder for one call: nobody else's, and gone when its owner is, whatever became of the owner.

Whoever uses a folder holds a lock on it, which the kernel drops with the last process that has it. So a folder that
nobody holds was left by a killed call, and the next call removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Scratch:
    """`folder` is empty at first. A child process that is given `hold` keeps the folder as long as it lives."""

    folder: Path
    hold: int


@contextlib.contextmanager
def scratch(rooms: Path) -> Iterator[Scratch]:
    """A fresh folder below `rooms` until the block ends; folders of calls that were killed are removed first."""
    rooms.mkdir(parents=True, exist_ok=True)
    # Between a folder's making and its lock nobody may take it for an abandoned one.
    with (rooms / ".lock").open("w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        _sweep(rooms)
        folder = Path(tempfile.mkdtemp(dir=rooms))
        hold = _take(folder)
    assert hold is not None
    try:
        yield Scratch(folder, hold)
    finally:
        # Let go first: a child that outlives this call keeps its folder, and a later call removes it.
        os.close(hold)
        with (rooms / ".lock").open("w") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            _remove(folder)


def _sweep(rooms: Path) -> None:
    for path in rooms.iterdir():
        if path.is_dir() and not path.is_symlink():
            _remove(path)


def _remove(folder: Path) -> None:
    """Remove a folder that nobody holds."""
    hold = _take(folder)
    if hold is None:
        return
    try:
        shutil.rmtree(folder)
    finally:
        os.close(hold)


def _take(folder: Path) -> int | None:
    """The lock of a folder as an open file; None when somebody else has it."""
    hold = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(hold)
        return None
    return hold

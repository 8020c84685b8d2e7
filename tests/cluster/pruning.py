"""Old versions of built programs leave the cache: of each set of programs a few folders stay, the ones used last.

What a process runs is never removed, whichever cluster it belongs to: it is found by the file that the process
executes, not by its path, because a node sees its programs under another one. When a folder was used last is its time
of change.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

KEPT_VERSIONS = 3
_GOING = ".going"


@contextlib.contextmanager
def using(folder: Path) -> Iterator[None]:
    """While it looks at what is built and uses it, nothing is removed below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def note_use(built: Path) -> None:
    """Let a folder count as used now."""
    os.utime(built)


def prune(folder: Path, say: Callable[[str], None], keep: int = KEPT_VERSIONS) -> list[Path]:
    """Remove what is old in `CACHE/bin` and say so; nothing while somebody else looks at it. What was removed."""
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return []
        for left in folder.glob(f"*{_GOING}"):
            shutil.rmtree(left)
        running = _running()
        removed = [old for old in _old(folder, keep) if not _files(old) & running]
        for old in removed:
            # Under another name first: what is half removed must not be taken for half built.
            going = old.with_name(f"{old.name}{_GOING}")
            old.rename(going)
            shutil.rmtree(going)
    if removed:
        say(f"build: removed {len(removed)} old versions: {', '.join(old.name for old in removed)}")
    return removed


def runs(folder: Path) -> bool:
    """Whether a process runs one of the programs in `CACHE/bin`."""
    built = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    running = _running()
    return any(_files(path) & running for path in built)


def _old(folder: Path, keep: int) -> list[Path]:
    """The folders beyond the newest `keep` of those that hold the same programs."""
    same: dict[tuple[bool, frozenset[str]], list[Path]] = {}
    for path in folder.iterdir():
        if path.is_dir():
            programs = frozenset(file.name for file in path.iterdir() if not file.name.startswith("."))
            same.setdefault((path.name.startswith("set-"), programs), []).append(path)
    return [
        old
        for paths in same.values()
        for old in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[keep:]
        if not _is_being_built(old)
    ]


def _is_being_built(folder: Path) -> bool:
    if not (folder / ".lock").exists():
        return False
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _files(folder: Path) -> set[tuple[int, int]]:
    return {(status.st_dev, status.st_ino) for status in (path.stat() for path in folder.iterdir())}


def _running() -> set[tuple[int, int]]:
    """Device and number of every file that a process of this machine executes, as far as this user may see."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                status = (entry / "exe").stat()
                found.add((status.st_dev, status.st_ino))
    return found

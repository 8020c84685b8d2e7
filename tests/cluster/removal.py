"""down: nothing is left of a cluster, whatever state it is in and whoever is left of those who made it.

Standard library only, as all that it uses: `make down` and `make clean` work without the environment, or half of it.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests import machine
from tests.cluster import cgroups, processes, pruning, state
from tests.cluster.build import Say, say
from tests.cluster.errors import ClusterError, StateConflict


def down(name: str) -> bool:
    """Remove everything of a cluster, whatever state it is in; False when there was nothing. May raise ClusterError."""
    return _down(state.folder_of(name))


def _down(folder: Path) -> bool:
    if not folder.exists() and not processes.marked(folder):
        return False
    with state.locked(folder, wait_seconds=60):
        remove(folder)
    return True


def known() -> list[str]:
    """The clusters of this checkout: by their folders, and by processes whose folder somebody removed."""
    running = {folder.name for folder in processes.marked_folders() if folder.parent == state.root()}
    return sorted(running.union(state.names()))


def down_all(listener: Say = say) -> None:
    """Remove every cluster of this checkout, and those of any that nobody is left to remove. May raise ClusterError."""
    failed = []
    for name in known():
        start = time.monotonic()
        try:
            removed = down(name)
        except (ClusterError, OSError) as error:
            # What stands in the way of one must not keep the others.
            failed.append(f"{name}: {error}")
            continue
        listener(f"cluster {name}: " + (f"removed after {time.monotonic() - start:.1f} s" if removed else "is gone"))
    remove_orphans(listener)
    if failed:
        raise ClusterError("; ".join(failed), "see to it, then run down again")


def remove_orphans(listener: Say = say) -> Sequence[str]:
    """Remove the clusters of test runs that were killed, and of checkouts that are gone; their names."""
    removed = []
    here = {folder for folder in processes.marked_folders() if state.of_user() in folder.parents}
    for folder in sorted(here.union(state.folders_of_user(), map(state.folder_of, state.names()))):
        if state.is_orphan(folder):
            listener(f"cluster {folder.name}: whoever made it has gone, removing it")
            with contextlib.suppress(ClusterError, OSError):
                _down(folder)
                removed.append(folder.name)
    return removed


def remove(folder: Path) -> None:
    """Remove a cluster's processes, cgroups and files; the caller holds its lock. ClusterError when something stays."""
    # What a launcher makes first is the folder `run`: without it, whatever is there is not ours.
    if folder.exists() and any(folder.iterdir()) and not (folder / "run").exists():
        raise StateConflict(
            f"{folder} holds files that are not a cluster's", "take them away, or run up with another --name"
        )
    survivors = processes.end_all(folder)
    if survivors:
        pids = " ".join(str(process.pid) for process in survivors)
        raise ClusterError(
            f"cluster {folder.name}: processes {pids} do not end", "look at their state in /proc, then run down again"
        )
    cgroups.remove(state.uid_of(folder))
    _remove_folder(folder)


def _remove_folder(folder: Path, timeout_seconds: float = 60.0) -> None:
    """Remove the folder; a namespace that is still being dismantled may hold a mount in it for a moment."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return shutil.rmtree(folder)
        except FileNotFoundError:
            if not folder.exists():
                return None
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY) or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def remove_caches() -> None:
    """Remove what was put into the cache folder, and nothing else there. ClusterError while a cluster runs from it."""
    folder = machine.cache_folder()
    if pruning.runs(folder / "bin"):
        clusters = ", ".join(sorted(map(str, processes.marked_folders())))
        raise ClusterError(
            f"programs of {folder} are running; clusters that are up: {clusters or 'none that this user may see'}",
            "run make down where they were started, then make clean again",
        )
    for path in (path for pattern in machine.CACHES for path in folder.glob(pattern)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    # Only an empty one: HPU_CACHE may name a folder that holds other things too.
    with contextlib.suppress(OSError):
        folder.rmdir()


def main(arguments: list[str]) -> int:
    """`python -m tests.cluster.removal`: every cluster of this checkout; `--caches` removes the caches as well."""
    try:
        down_all()
        if "--caches" in arguments:
            remove_caches()
    except (ClusterError, OSError) as error:
        print(f"tests.cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

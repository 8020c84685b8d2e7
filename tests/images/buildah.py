"""Runs buildah so that nothing is left on the machine: its storage is ours, its mounts and processes end with the call.

buildah keeps mounts of its storage in the mount namespace that it runs in; in a namespace of its own they vanish, also
when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.images.errors import MissingProgram, StepFailed
from tests.images.scratch import scratch
from tests.images.store import Store

ISOLATED = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
LISTINGS = 10
LISTING_PAUSE_SECONDS = 0.2
_HAS_GONE = re.compile(r"Error: (locating item named|.*: image not known|.*: layer not known)")
# What buildah remembers about layers has a fixed place; without it every push would compress all layers again.
_OWN_MEMORY = 'mkdir -p "$0" /var/lib/containers && mount --bind "$0" /var/lib/containers && exec "$@"'


@dataclass(frozen=True)
class Room:
    """A call's own temporary files: how to call buildah with them, and `hold`, which the child must be given."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    hold: int


@dataclass(frozen=True)
class Buildah:
    """buildah on the store's own storage. `uv_cache` is lent to builds: what the machine has is not fetched twice."""

    store: Store
    uv_cache: Path

    @classmethod
    def on(cls, store: Store) -> Buildah:
        for program in ("buildah", "unshare"):
            if not shutil.which(program):
                raise MissingProgram(f"{program} is not installed", "make system-packages (Debian), then try again")
        if os.geteuid() != 0:
            raise MissingProgram("building images needs root: it makes mounts", "run it as root")
        return cls(store, Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv"))

    @contextlib.contextmanager
    def room(self) -> Iterator[Room]:
        """What one call has for itself: buildah counts mounts there, and they go with the call's mount namespace."""
        with scratch(self.store.scratch) as own:
            # The place where buildah 1.28 looks for a cache mount with the id `uv`.
            lent = own.folder / f"buildah-cache-{os.getuid()}" / "uv"
            lent.parent.mkdir()
            self.uv_cache.mkdir(parents=True, exist_ok=True)
            lent.symlink_to(self.uv_cache)
            options = ("--root", self.store.storage, "--runroot", own.folder / "run", "--storage-driver", "overlay")
            yield Room(
                command=("buildah", *map(str, options)),
                environment={"TMPDIR": str(own.folder), "BUILDAH_ISOLATION": "chroot"},
                hold=own.hold,
            )

    def has(self, reference: str) -> bool:
        """Whether an image of this name is in the storage."""
        return reference in self.images("--format", "{{.Name}}:{{.Tag}}").split()

    def images(self, *arguments: str) -> str:
        """What `buildah images` prints. It lists first and reads then: an image that goes in between, as those of a
        build's steps do, fails it. So it is asked again, a few times.
        """
        for _ in range(LISTINGS - 1):
            try:
                return self.run("listing images", "images", *arguments)
            except StepFailed as failed:
                if not _HAS_GONE.search(str(failed)):
                    raise
                time.sleep(LISTING_PAUSE_SECONDS)
        return self.run("listing images", "images", *arguments)

    def run(self, what: str, *arguments: str | Path, cwd: Path | None = None) -> str:
        """Standard output; the rest goes to the store's log. Raises StepFailed with the last lines."""
        memory = self.store.folder / "memory"
        with self.room() as room, self.store.log.open("a") as log:
            log.write(f"\n$ buildah {' '.join(map(str, arguments))}\n")
            log.flush()
            done = subprocess.run(
                [str(part) for part in (*ISOLATED, "sh", "-c", _OWN_MEMORY, memory, *room.command, *arguments)],
                cwd=cwd,
                env=os.environ | room.environment,
                pass_fds=(room.hold,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
            )
            log.write(done.stdout)
        if done.returncode != 0:
            raise StepFailed(
                f"{what} failed (exit {done.returncode}):\n{tail(self.store.log)}", f"see {self.store.log}"
            )
        return done.stdout.strip()


def tail(path: Path, lines: int = 15) -> str:
    return "\n".join(f"    {line}" for line in path.read_text(errors="replace").splitlines()[-lines:])

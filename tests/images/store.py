"""Where images are kept, outside the work tree: one folder in the cache, used by one process at a time.

storage/     buildah's layers, its own and not the machine's
base/        the base image's file system as one archive
kernels/     the engine's kernels, where `make setup` had not built them
oci/         the finished images, sharing layers: an OCI layout
built.json   what each checkout built last, and from which content
uses.json    when each version was asked for last
tmp/         a folder for each call that is at work
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.machine import cache_folder

HEARTBEAT_SECONDS = 15.0


@dataclass(frozen=True)
class Store:
    """`set_name` tells apart sets of finished images that share buildah's layers; a test's own, for one."""

    folder: Path
    set_name: str = ""

    @classmethod
    def default(cls) -> Store:
        return cls(cache_folder() / "images")

    @property
    def storage(self) -> Path:
        return self.folder / "storage"

    @property
    def layout(self) -> Path:
        return self.folder / f"oci{self.set_name}"

    @property
    def record(self) -> Path:
        return self.folder / f"built{self.set_name}.json"

    @property
    def uses(self) -> Path:
        return self.folder / "uses.json"

    @property
    def scratch(self) -> Path:
        return self.folder / "tmp"

    @property
    def log(self) -> Path:
        return self.folder / "build.log"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One builder at a time; a second one waits and says so. The lock goes with its process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another build is at work; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def checksum(parts: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 over names and contents, in the order given; hex."""
    digest = hashlib.sha256()
    for name, content in parts:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def say(text: str) -> None:
    print(f"images: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Says what takes long when it starts, while it is at work, and how long it took."""
    say(f"{text} ...")
    start = time.monotonic()
    with heartbeat(text, say):
        yield
    say(f"{text}: {time.monotonic() - start:.1f} s")


@contextlib.contextmanager
def heartbeat(text: str, listener: Callable[[str], None]) -> Iterator[None]:
    """While something long is at work, say so again and again, so that silence never looks like a hang."""
    start = time.monotonic()
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            listener(f"{text}: at work for {time.monotonic() - start:.0f} s")

    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    try:
        yield
    finally:
        ended.set()
        heart.join()

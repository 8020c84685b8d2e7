"""Builds the cluster's programs from the Go modules in go/, once per checksum, into the cache.

A program's place is `CACHE/bin/SUM/NAME`, SUM over all that decides what it is: go.mod, go.sum, flags, Go's version.
It is linked aside and renamed into place, so what has its name is whole; what a killed build had compiled stays in Go's
own build cache, and the next build goes on from there. A file lock lets one builder work and the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster import modules, pruning
from tests.cluster.errors import BuildFailed, MissingRequirement
from tests.cluster.modules import Module, Program
from tests.machine import cache_folder

# Seconds without news after which a build says that it is still at work.
_HEARTBEAT_SECONDS = 5.0

Say = Callable[[str], None]


def say(message: str) -> None:
    """The default listener: one line to standard error, so that output stays usable by a shell."""
    print(message, file=sys.stderr, flush=True)


@dataclass
class Progress:
    """What is known of a running `go build -v`: packages it has named, modules it has fetched, its last words."""

    module: str
    total: int
    started: float
    compiled: int = 0
    fetched: int = 0
    last: str = ""
    errors: list[str] = field(default_factory=list)

    def read(self, line: str) -> None:
        """Take one line of standard error: a fetched module, a compiled package, or a complaint."""
        line = line.strip()
        if not line:
            return
        if line.startswith("go: downloading "):
            self.fetched += 1
            self.last = f"fetching {line.split()[2]}"
        elif " " not in line:
            self.compiled += 1
            self.last = line
        else:
            self.errors = [*self.errors[-39:], line]

    def report(self) -> str:
        """One line for whoever waits; names what happened since the last one."""
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        of = f" of at most {self.total}" if self.total else ""
        # Go says nothing while it links, nor while it finds packages in its cache.
        last, self.last = self.last or "linking, or reading Go's build cache", ""
        return f"build {self.module}: {minutes}:{seconds:02d}, {self.compiled}{of} packages, {last}"


def checksum(module: Module, go_version: str) -> str:
    parts = [go_version, *module.flags, *sorted(f"{key}={value}" for key, value in module.env.items())]
    digest = hashlib.sha256("\0".join(parts).encode())
    for name in ("go.mod", "go.sum"):
        digest.update((module.folder / name).read_bytes())
    for source in sorted(module.folder.rglob("*.go")):
        digest.update(source.relative_to(module.folder).as_posix().encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def go_version() -> str:
    """What `go version` says. MissingRequirement when there is no Go."""
    if shutil.which("go") is None:
        raise MissingRequirement(
            "Go is not on PATH: the cluster's programs are built from source", "install Go 1.26 or newer (go.dev/dl)"
        )
    return subprocess.run(["go", "version"], capture_output=True, text=True, check=True).stdout.strip()


def build(module: Module, programs: Sequence[Program], listener: Say = say) -> Path:
    """Build what is missing of these programs; returns the folder that holds them. BuildFailed, MissingRequirement."""
    target = cache_folder() / "bin" / checksum(module, go_version())
    try:
        with pruning.using(target.parent):
            if all((target / program.name).exists() for program in programs):
                pruning.note_use(target)
                return target
        target.mkdir(parents=True, exist_ok=True)
        with (target / ".lock").open("a+") as lock:
            _acquire(lock.fileno(), module.name, listener)
            missing = [program for program in programs if not (target / program.name).exists()]
            if missing:
                _build(module, missing, target, listener)
    except OSError as error:
        raise BuildFailed(
            f"building {module.name}: {error}", "free some room, or point HPU_CACHE at another disk"
        ) from None
    return target


def _acquire(lock: int, name: str, listener: Say) -> None:
    told = 0.0
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - told > _HEARTBEAT_SECONDS:
                listener(f"build {name}: waiting for another build of the same")
                told = time.monotonic()
            time.sleep(0.2)


def _build(module: Module, programs: Sequence[Program], target: Path, listener: Say) -> None:
    aside = target / ".aside"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    env = {**os.environ, **module.env}
    packages = [program.package for program in programs]
    progress = Progress(module.name, _count_packages(module, packages, env), time.monotonic())
    names = ", ".join(program.name for program in programs)
    listener(f"build {module.name}: {names} (minutes when cold; stop and start again at will)")
    argv = ["go", "build", "-v", *module.flags, "-o", f"{aside}/", *packages]
    code = _follow(argv, module.folder, env, progress, listener)
    if code:
        raise _explain(module, code, progress)
    for program in programs:
        (aside / program.built_as).replace(target / program.name)
    shutil.rmtree(aside)
    listener(f"build {module.name}: done after {time.monotonic() - progress.started:.0f} s")


def _count_packages(module: Module, packages: Sequence[str], env: dict[str, str]) -> int:
    listed = subprocess.run(
        ["go", "list", "-deps", *packages], cwd=module.folder, env=env, capture_output=True, text=True, check=False
    )
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


def _follow(argv: list[str], folder: Path, env: dict[str, str], progress: Progress, listener: Say) -> int:
    """Run go build, report every few seconds; its exit code. The build ends with us, also by Ctrl-C."""
    with subprocess.Popen(argv, cwd=folder, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        selector = selectors.DefaultSelector()
        selector.register(process.stderr, selectors.EVENT_READ)
        told, rest = time.monotonic(), b""
        try:
            while True:
                if selector.select(timeout=1.0):
                    chunk = os.read(process.stderr.fileno(), 65536)
                    if not chunk:
                        break
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        progress.read(line.decode(errors="replace"))
                if time.monotonic() - told >= _HEARTBEAT_SECONDS:
                    listener(progress.report())
                    told = time.monotonic()
        except BaseException:
            process.terminate()
            raise
        return process.wait()


def _explain(module: Module, code: int, progress: Progress) -> BuildFailed:
    text = "\n".join(f"  | {line}" for line in progress.errors[-15:])
    what = f"go build of {module.name} ended with {code}\n{text}"
    if "no space left on device" in text:
        return BuildFailed(what, "free some room, or point HPU_CACHE, GOCACHE and TMPDIR at another disk")
    if "dial tcp" in text or "no such host" in text:
        return BuildFailed(what, "the Go module proxy could not be reached: see `go env GOPROXY`, then run this again")
    if "seccomp" in text:
        return BuildFailed(
            what, "as root: make system-packages (runc needs the headers of libseccomp and a C compiler)"
        )
    return BuildFailed(what, "run this again to go on from here; `go clean -cache` if Go's own cache is damaged")


def cluster_binaries(*, nodes: bool, version: str = modules.KUBERNETES_VERSION, listener: Say = say) -> Path:
    """One folder with links to every program that a cluster of this size needs; builds what is missing."""
    built = [
        (build(module, programs, listener), programs)
        for module, programs in modules.needed(nodes=nodes, version=version)
    ]
    key = hashlib.sha256("".join(str(folder) for folder, _ in built).encode()).hexdigest()[:16]
    links = cache_folder() / "bin" / f"set-{key}"
    with pruning.using(links.parent):
        is_new = not links.exists()
        links.mkdir(parents=True, exist_ok=True)
        for folder, programs in built:
            for program in programs:
                link = links / program.name
                with contextlib.suppress(FileExistsError):
                    os.link(folder / program.name, link)
        pruning.note_use(links)
    if is_new:
        pruning.prune(links.parent, listener)
    return links

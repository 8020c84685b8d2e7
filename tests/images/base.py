"""The base image for a machine without a container registry: Debian with Python, from Debian packages.

It stands in for `python:*-slim` as the Dockerfile's PYTHON_BASE. Made once per recipe; the archive stays in the cache.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.images.buildah import Buildah, tail
from tests.images.errors import MissingProgram, StepFailed
from tests.images.scratch import scratch
from tests.images.store import Store, checksum, step

SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
# Nothing of this machine (addresses of mirrors, host name, logs) and nothing that no program reads.
REMOVED = (
    "etc/apt/sources.list",
    "etc/hostname",
    "etc/resolv.conf",
    "usr/share/doc",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
)
_RECIPE = checksum(
    [("suite", SUITE.encode()), ("packages", repr(PACKAGES).encode()), ("removed", repr(REMOVED).encode())]
)
REFERENCE = f"localhost/hpu-inference/base:{_RECIPE[:12]}"


def mirror() -> str:
    """The Debian mirror that this machine uses, from apt's own configuration."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(CREATED_BY) $(REPO_URI)"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    if found := re.search(rf"^{SUITE} main Packages (\S+)$", listed, re.MULTILINE):
        return found[1]
    raise MissingProgram(
        f"apt on this machine has no source for Debian {SUITE}",
        "build on Debian 12, or use `docker build` with a public Python image as PYTHON_BASE",
    )


def ensure(store: Store, buildah: Buildah) -> str:
    """Builds the base image unless it is there. Returns its reference, which names the recipe."""
    if buildah.has(REFERENCE):
        return REFERENCE
    archive = store.folder / "base" / f"{_RECIPE[:12]}.tar"
    if not archive.exists():
        _bootstrap(store, archive)
    with step("base image"), scratch(store.scratch) as context:
        (context.folder / "rootfs.tar").hardlink_to(archive)
        (context.folder / "Dockerfile").write_text('FROM scratch\nADD rootfs.tar /\nCMD ["python3"]\n')
        buildah.run("the base image", "build", "--tag", REFERENCE, context.folder)
    return REFERENCE


def _bootstrap(store: Store, archive: Path) -> None:
    if not shutil.which("debootstrap"):
        raise MissingProgram("debootstrap is not installed", "make system-packages (Debian), then try again")
    archive.parent.mkdir(parents=True, exist_ok=True)
    source = mirror()
    with step(f"Debian {SUITE} with Python (minutes, once)"), scratch(store.scratch) as place:
        tree = place.folder / "root"
        _run(
            store,
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"),
            *("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(tree), source),
        )
        for name in REMOVED:
            path = tree / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (tree / "var/log").mkdir()
        partial = archive.with_suffix(".partial")
        _run(
            store,
            "tar",
            "--sort=name",
            "--numeric-owner",
            "--one-file-system",
            "-C",
            str(tree),
            "-cf",
            str(partial),
            ".",
        )
        partial.rename(archive)


def _run(store: Store, *command: str) -> None:
    with store.log.open("a") as log:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    if done.returncode != 0:
        raise StepFailed(f"{command[0]} failed (exit {done.returncode}):\n{tail(store.log)}", f"see {store.log}")

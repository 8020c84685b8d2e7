"""A containerd folder with the images unpacked, made once, and put under a node's containerd before it starts.

Unpacking 1.7 GB takes each node long. The folder that a containerd made of it can be copied instead, by hard links:
content and snapshots are never changed in place (a container writes to a layer of its own), and the databases, which
are, are copied in earnest. Where links cannot be made, because the caches lie on another file system than the cluster,
nothing is placed, and the images are imported as usual.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.images import archive
from tests.images.build import Image
from tests.images.buildah import ISOLATED, tail
from tests.images.errors import StepFailed
from tests.images.layout import Layout
from tests.images.pruning import KEPT_VERSIONS
from tests.images.store import Store, checksum, step

_FORMAT = "1"
# What containerd changes in place; everything else below its root is written once.
_DATABASES = "io.containerd.*/*.db"
# A containerd's own identity: each node makes one.
_IDENTITY = "io.containerd.grpc.v1.introspection"

# $1 root, $2 folder with the programs, $3 archive, $4 file that names the images to keep. /run is this call's own.
_SCRIPT = """
set -eu
export PATH="$2:$PATH"
mount -t tmpfs tmpfs /run
mkdir /run/etc
cat >/run/etc/containerd.toml <<END
version = 3
root = "$1"
state = "/run/containerd"
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri",
  "io.containerd.nri.v1.nri"]
[plugins.'io.containerd.internal.v1.opt']
  path = "/run/opt"
END
containerd --config /run/etc/containerd.toml --log-level warn &
daemon=$!
tries=0
until ctr --connect-timeout 1s version >/dev/null 2>&1; do
  tries=$((tries + 1))
  [ "$tries" -lt 100 ] || { echo "containerd does not answer" >&2; exit 1; }
  sleep 0.1
done
ctr --namespace k8s.io images import --snapshotter overlayfs "$3"
for image in $(ctr --namespace k8s.io images ls -q); do
  grep -Fqx "$image" "$4" || ctr --namespace k8s.io images rm --sync "$image"
done
kill "$daemon"
wait "$daemon" || true
"""


def prepare(store: Store, images: Sequence[Image], binaries: Path) -> Path:
    """The containerd folder with just these images; made from the newest earlier one when there is one."""
    seed = _folder(store, images)
    seeds = seed.parent
    with store.locked():
        if seed.exists():
            os.utime(seed)
            return seed
        seeds.mkdir(exist_ok=True)
        for path in seeds.glob("*.partial"):
            shutil.rmtree(path)
        earlier = sorted(seeds.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        partial = seed.with_suffix(".partial")
        with step("images unpacked for the nodes (once per content)"):
            held: set[str] = set()
            if earlier and _linked(earlier[0], partial):
                held = {
                    f"sha256:{path.name}" for path in partial.glob("io.containerd.content.v1.content/blobs/sha256/*")
                }
            _import(store, images, partial, binaries, held)
            shutil.rmtree(partial / _IDENTITY, ignore_errors=True)
            _share_blobs(store, partial)
            partial.rename(seed)
            os.utime(seed)
        for path in earlier[KEPT_VERSIONS - 1 :]:
            # Under another name first: whoever copies it just now notices, and takes no half for a whole.
            going = path.with_suffix(".partial")
            path.rename(going)
            shutil.rmtree(going)
        return seed


def _folder(store: Store, images: Sequence[Image]) -> Path:
    parts = [("format", _FORMAT.encode()), *sorted((image.reference, image.digest.encode()) for image in images)]
    return store.folder / "seed" / checksum(parts)[:16]


def _import(store: Store, images: Sequence[Image], root: Path, binaries: Path, held: set[str]) -> None:
    file, keep = store.folder / "import.tar", store.folder / "import.keep"
    try:
        archive.write(file, Layout(store.layout), images, held=held)
        keep.write_text("".join(f"{image.reference}\n" for image in images))
        with store.log.open("a") as log:
            done = subprocess.run(
                [*ISOLATED, "sh", "-c", _SCRIPT, "seed", str(root), str(binaries), str(file), str(keep)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
            )
        if done.returncode:
            shutil.rmtree(root, ignore_errors=True)
            raise StepFailed(f"unpacking the images failed:\n{tail(store.log)}", f"see {store.log}")
    finally:
        file.unlink(missing_ok=True)
        keep.unlink(missing_ok=True)


def _share_blobs(store: Store, root: Path) -> None:
    """Lets containerd's content be the layout's own files: the layers then lie on the disk once."""
    for blob in (root / "io.containerd.content.v1.content" / "blobs" / "sha256").iterdir():
        original = Layout(store.layout).blob(f"sha256:{blob.name}")
        if original.exists() and not original.samefile(blob):
            blob.unlink()
            blob.hardlink_to(original)


def place(store: Store, images: Sequence[Image], root: Path) -> bool:
    """Puts the folder for these images at a containerd's `root`, if it has been prepared and links can be made.

    The containerd must not run, and `root` must not exist: what a node has is left alone.
    """
    seed = _folder(store, images)
    return seed.exists() and not root.exists() and _linked(seed, root)


def _linked(seed: Path, root: Path) -> bool:
    """Copies by hard links, the databases in earnest. False, with nothing left, when the file system refuses."""
    partial = root.with_name(f"{root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["cp", "-al", str(seed), str(partial)], capture_output=True, check=False)
    if done.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        return False
    try:
        for path in list(partial.glob(_DATABASES)):
            path.unlink()
            shutil.copy2(seed / path.relative_to(partial), path)
        partial.rename(root)
    except OSError:  # removed meanwhile, or the disk is full
        shutil.rmtree(partial, ignore_errors=True)
        return False
    return True

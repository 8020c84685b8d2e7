"""Takes single layers out of buildah's storage, as uncompressed archives.

`buildah push` writes every layer of an image anew, gigabytes for a change of one file. The storage keeps each layer's
files in a folder; an archive of that folder is made once per layer. Its checksum is another than the one that buildah
would give it, which is fine: the image's configuration is written to fit.
"""

from __future__ import annotations

import hashlib
import json
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.images.errors import StepFailed
from tests.images.store import Store

MEDIA_TYPE = "application/vnd.oci.image.layer.v1.tar"
_TAR = (
    *("tar", "--create", "--sort=name", "--numeric-owner", "--format=posix"),
    *("--pax-option=delete=atime,delete=ctime", "--xattrs", "--xattrs-include=security.capability"),
)
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Layer:
    """A layer in buildah's storage: its id there, and the checksum that buildah gave it."""

    name: str
    diff_id: str
    folder: Path


def of_image(store: Store, reference: str) -> list[Layer]:
    """An image's layers, the lowest first."""
    images = json.loads((store.storage / "overlay-images" / "images.json").read_text())
    layers = json.loads((store.storage / "overlay-layers" / "layers.json").read_text())
    by_name = {layer["id"]: layer for layer in layers}
    found: list[Layer] = []
    name = next((image["layer"] for image in images if reference in image.get("names", [])), "")
    while name:
        folder = store.storage / "overlay" / name / "diff"
        found.insert(0, Layer(name, by_name[name]["diff-digest"], folder))
        name = by_name[name].get("parent", "")
    if not found:
        raise StepFailed(f"{reference} is not in buildah's storage", f"see {store.log}")
    return found


def write(layer: Layer, target: Path) -> str:
    """Writes the layer's archive; returns its SHA-256 in hex. StepFailed where a layer removes files of those below."""
    if removed := next(_whiteouts(layer.folder), None):
        raise StepFailed(f"a layer removes {removed}", "let the Dockerfile remove files in the step that makes them")
    digest = hashlib.sha256()
    with (
        subprocess.Popen([*_TAR, "-C", str(layer.folder), "."], stdout=subprocess.PIPE) as tar,
        target.open("wb") as file,
    ):
        assert tar.stdout is not None
        while block := tar.stdout.read(_BLOCK):
            digest.update(block)
            file.write(block)
    if tar.returncode:
        raise StepFailed(f"tar of {layer.folder} ended with {tar.returncode}", "is the disk full?")
    return digest.hexdigest()


def _whiteouts(folder: Path) -> Iterator[Path]:
    """What an overlay file system has for a removed file: a character device with the number 0."""
    devices = subprocess.run(["find", folder, "-type", "c"], capture_output=True, text=True, check=True).stdout
    for line in devices.splitlines():
        status = Path(line).lstat()
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            yield Path(line).relative_to(folder)

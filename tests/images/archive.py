"""An image archive for `ctr images import`: an OCI layout in one tar file, without the blobs that the importer has."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Collection, Sequence
from pathlib import Path

from tests.images.build import Image
from tests.images.layout import Layout

# What containerd calls the image; its own annotation takes the name as it is.
_NAME = "io.containerd.image.name"


def write(path: Path, layout: Layout, images: Sequence[Image], *, held: Collection[str] = ()) -> int:
    """Writes the archive and returns its size in bytes. `held` are digests of blobs that the importer has already.

    containerd wants the manifest, the configuration and what it lacks; layers that it has unpacked it does not read.
    """
    described = [
        {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": image.digest,
            "size": layout.blob(image.digest).stat().st_size,
            "annotations": {_NAME: image.reference},
        }
        for image in images
    ]
    with tarfile.open(path, "w") as tar:
        _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": described}).encode())
        for digest in sorted({part for image in images for part in layout.referenced(image.digest)}):
            if digest not in held:
                tar.add(layout.blob(digest), arcname=f"blobs/sha256/{digest.removeprefix('sha256:')}")
    return path.stat().st_size


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))

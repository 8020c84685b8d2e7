"""The OCI layout on disk: the finished images, each layer once and uncompressed.

Follows the OCI image layout specification 1.0: `index.json` lists manifests, `blobs/sha256/` holds all by digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.images import layers
from tests.images.buildah import Buildah
from tests.images.store import Store

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True)
class Layout:
    folder: Path

    def blob(self, digest: str) -> Path:
        algorithm, _, value = digest.partition(":")
        return self.folder / "blobs" / algorithm / value

    def manifests(self) -> list[dict[str, Any]]:
        """The descriptors in index.json."""
        index = self.folder / "index.json"
        return list(json.loads(index.read_text())["manifests"]) if index.exists() else []

    def add(self, store: Store, buildah: Buildah, reference: str) -> str:
        """Takes an image out of buildah's storage, except layers that are here already. Returns the digest."""
        (self.folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        inspected = json.loads(buildah.run(f"inspecting {reference}", "inspect", "--type", "image", reference))
        configuration = inspected["OCIv1"]
        known = self._known()
        descriptors = []
        for layer in layers.of_image(store, reference):
            if layer.diff_id not in known or not self.blob(known[layer.diff_id]).exists():
                known[layer.diff_id] = self._add_layer(layer)
                self._remember(known)
            digest = known[layer.diff_id]
            size = self.blob(digest).stat().st_size
            descriptors.append({"mediaType": layers.MEDIA_TYPE, "digest": digest, "size": size})
        configuration["rootfs"]["diff_ids"] = [descriptor["digest"] for descriptor in descriptors]
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._add_blob(json.dumps(configuration).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": descriptors,
        }
        described = self._add_blob(json.dumps(manifest).encode(), MANIFEST)
        others = [entry for entry in self.manifests() if entry["annotations"][_NAME] != reference]
        self._write_index([*others, described | {"annotations": {_NAME: reference}}])
        return str(described["digest"])

    def _add_layer(self, layer: layers.Layer) -> str:
        partial = self.folder / "layer.partial"
        checksum = layers.write(layer, partial)
        partial.rename(self.blob(f"sha256:{checksum}"))
        return f"sha256:{checksum}"

    def _add_blob(self, content: bytes, media_type: str) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if not self.blob(digest).exists():
            partial = self.folder / "blob.partial"
            partial.write_bytes(content)
            partial.rename(self.blob(digest))
        return {"mediaType": media_type, "digest": digest, "size": len(content)}

    def _known(self) -> dict[str, str]:
        """buildah's checksum of a layer -> the digest of its archive here."""
        file = self.folder / "layers.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def _remember(self, known: dict[str, str]) -> None:
        (self.folder / "layers.json").write_text(json.dumps(known))

    def _write_index(self, manifests: list[dict[str, Any]]) -> None:
        partial = self.folder / "index.json.partial"
        partial.write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
        partial.replace(self.folder / "index.json")
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def referenced(self, digest: str) -> Iterator[str]:
        """A manifest's own digest, its configuration's and its layers'."""
        manifest = json.loads(self.blob(digest).read_text())
        yield digest
        yield manifest["config"]["digest"]
        for layer in manifest["layers"]:
            yield layer["digest"]

    def is_whole(self, digest: str) -> bool:
        """Whether everything that the manifest needs is there (a copy that was cut short has another name)."""
        return self.blob(digest).exists() and all(self.blob(part).exists() for part in self.referenced(digest))

    def keep(self, references: Iterable[str]) -> None:
        """Removes every other image and every blob that nothing refers to any more."""
        if not self.folder.exists():
            return
        kept_names = set(references)
        named = [entry for entry in self.manifests() if entry["annotations"][_NAME] in kept_names]
        kept = [entry for entry in named if self.blob(entry["digest"]).exists()]
        digests = {part for entry in kept for part in self.referenced(entry["digest"])}
        self._write_index(kept)
        self._remember({diff_id: digest for diff_id, digest in self._known().items() if digest in digests})
        for path in (self.folder / "blobs" / "sha256").iterdir():
            if f"sha256:{path.name}" not in digests:
                path.unlink()

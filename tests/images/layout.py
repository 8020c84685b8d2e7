"""The OCI layout on disk: the finished images, each layer once and compressed, as a registry would keep them.

Follows the OCI image layout specification 1.0: `index.json` lists manifests, `blobs/sha256/` holds all by digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.images.buildah import Buildah

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

    def add(self, buildah: Buildah, reference: str) -> str:
        """Copies an image out of buildah's storage, except layers that are here already. Returns the digest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        digest_file = self.folder / "digest"
        # The last part of an `oci:` destination is what index.json calls the image.
        buildah.run(
            f"copying {reference}",
            *("push", "--quiet", "--disable-compression", "--digestfile", digest_file),
            *(reference, f"oci:{self.folder}:{reference}"),
        )
        digest = digest_file.read_text().strip()
        digest_file.unlink()
        return digest

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
        kept_names = set(references)
        kept = [entry for entry in self.manifests() if entry.get("annotations", {}).get(_NAME) in kept_names]
        digests = {part for entry in kept for part in self.referenced(entry["digest"])}
        partial = self.folder / "index.json.partial"
        partial.write_text(json.dumps({"schemaVersion": 2, "manifests": kept}))
        partial.replace(self.folder / "index.json")
        for path in (self.folder / "blobs" / "sha256").iterdir():
            if f"sha256:{path.name}" not in digests:
                path.unlink()

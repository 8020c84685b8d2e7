"""Pushes built images to a user's own registry, with buildah and the credentials that it finds (`buildah login`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.images.build import Image, recorded
from tests.images.buildah import Buildah
from tests.images.errors import ImageError, UnknownImage
from tests.images.store import Store, step

_PREFIX = re.compile(r"(?P<host>[A-Za-z0-9.-]+(:\d{1,5})?)(/[a-z0-9]+([._-][a-z0-9]+)*)*\Z")
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3})(:\d+)?\Z")


class BadRegistry(ImageError):
    """What was given does not name a registry."""


@dataclass(frozen=True)
class Pushed:
    """An image in a registry: `reference` is what a cluster pulls."""

    target: str
    reference: str
    digest: str


def push(prefix: str, targets: Sequence[str] = (), store: Store | None = None) -> list[Pushed]:
    """Pushes the images that were built last, or just `targets`, to PREFIX/TARGET:TAG.

    A registry on the loopback is spoken to without TLS. Raises BadRegistry, UnknownImage, StepFailed.
    """
    store = store or Store.default()
    match = _PREFIX.match(prefix)
    if not match:
        raise BadRegistry(f"{prefix!r} is not a registry", "write HOST[:PORT][/PATH], as in registry.example:5000/hpu")
    verify = "false" if _LOOPBACK.match(match["host"]) else "true"
    images = recorded(store)
    if missing := [target for target in targets or images or ["operator"] if target not in images]:
        raise UnknownImage(f"{missing[0]} has not been built", f"python -m tests.images build {missing[0]}")
    buildah = Buildah.on(store)
    with store.locked():
        return [
            _push(buildah, store, image, f"{prefix}/{image.target}:{image.reference.rpartition(':')[2]}", verify)
            for target, image in images.items()
            if not targets or target in targets
        ]


def _push(buildah: Buildah, store: Store, image: Image, reference: str, verify: str) -> Pushed:
    digest_file = store.folder / "digest"
    with step(f"push {reference}"):
        buildah.run(
            f"pushing {reference}",
            *("push", "--quiet", f"--tls-verify={verify}", "--digestfile", digest_file),
            *(image.reference, f"docker://{reference}"),
        )
    digest = digest_file.read_text().strip()
    digest_file.unlink()
    return Pushed(image.target, reference, digest)

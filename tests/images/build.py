"""Builds the Dockerfile's targets on the base image into the OCI layout, once per content.

An image's tag is the checksum of everything that it is made from. So a finished image is never built again, a node that
has the tag has the content, and `imagePullPolicy: IfNotPresent` is right. Dependencies and code are separate layers;
buildah's layer cache keeps the first when only the second changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.images import base, index, kernels
from tests.images.buildah import Buildah
from tests.images.errors import UnknownImage
from tests.images.layout import Layout
from tests.images.pruning import note_use, prune, stored
from tests.images.scratch import scratch
from tests.images.store import Store, checksum, say, step

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "localhost/hpu-inference"
LOCKS = {"operator": "operator.txt", "engine-cpu": "cpu.txt", "engine-gaudi": "engine.txt"}
ENVIRONMENTS = {"operator": "operator-environment", "engine-cpu": "cpu-environment"}
"""The Dockerfile's stage with the dependencies alone: built once per lock, so that a change of code skips it whole."""
WITH_KERNELS = ("engine-cpu",)
"""What gets the library that was built ahead."""
LOCAL_TARGETS = ("operator", "engine-cpu")
"""What clusters on this machine run: kept in the layout too. The Gaudi image is for a registry."""


@dataclass(frozen=True)
class Image:
    """A built image: `reference` names its content. `digest` is its manifest's in the layout, where it is in there."""

    target: str
    reference: str
    digest: str


@dataclass(frozen=True)
class Bases:
    """The Dockerfile's build arguments. Without `python` our own base is made; `gaudi` is needed for engine-gaudi."""

    python: str = ""
    gaudi: str = ""


def sources(root: Path, target: str) -> Iterator[Path]:
    """Every file that decides what `target` is, in a fixed order."""
    for name in (".dockerignore", "Dockerfile", "LICENSE", "README.md", "pyproject.toml"):
        yield root / name
    yield root / "requirements" / "build.txt"
    yield root / "requirements" / LOCKS[target]
    for folder in ("engine", "images", "operator"):
        for path in sorted((root / folder).rglob("*")):
            # Libraries that were built ahead are no sources: engine-cpu has its own part of the checksum for them.
            if path.is_file() and "__pycache__" not in path.parts and not path.match("kernels-*.so"):
                yield path


def environment_tag(root: Path, target: str, bases: Bases) -> str:
    """The checksum of what decides a target's dependencies."""
    files = (path for path in sources(root, target) if path.relative_to(root).parts[0] not in ("engine", "operator"))
    # The project's own metadata and documents come with its code.
    kept = [path for path in files if path.suffix not in (".toml", ".md") and path.name != "LICENSE"]
    parts = ((path.relative_to(root).as_posix(), path.read_bytes()) for path in kept)
    return checksum([("base", (bases.python or base.REFERENCE).encode()), *parts])[:12]


def tag(root: Path, target: str, bases: Bases, library: Path | None) -> str:
    """The checksum of the content, and of the names of the bases, shortened to 12 hex digits."""
    parts = ((path.relative_to(root).as_posix(), path.read_bytes()) for path in sources(root, target))
    on = f"{bases.python or base.REFERENCE} {bases.gaudi if target not in LOCAL_TARGETS else ''}"
    own = kernels.parts(library) if target in WITH_KERNELS else []
    return checksum([("bases", on.encode()), ("target", target.encode()), *own, *parts])[:12]


def build(
    targets: Sequence[str] = LOCAL_TARGETS,
    *,
    root: Path = ROOT,
    store: Store | None = None,
    bases: Bases = Bases(),
) -> dict[str, Image]:
    """Builds what is not there yet; returns all `targets`. Raises ImageError."""
    if unknown := sorted(set(targets) - LOCKS.keys()):
        raise UnknownImage(f"no image is called {unknown[0]}", f"choose from {', '.join(LOCKS)}")
    if not bases.gaudi and "engine-gaudi" in targets:
        raise UnknownImage(
            "engine-gaudi needs a base", "--gaudi-base INTEL'S-GAUDI-PYTORCH-IMAGE of your driver's release"
        )
    store = store or Store.default()
    with store.locked():
        built = recorded(store)
        library = kernels.library(store, root) if set(targets) & set(WITH_KERNELS) else None
        wanted = {target: tag(root, target, bases, library) for target in targets}
        if missing := [target for target in targets if not _is_whole(store, built.get(target), wanted[target])]:
            buildah = Buildah.on(store)
            python = bases.python or base.ensure(store, buildah)
            for target in missing:
                reference = f"{PREFIX}/{target}:{wanted[target]}"
                arguments = {"PYTHON_BASE": python, "GAUDI_BASE": bases.gaudi}
                if stage := ENVIRONMENTS.get(target):
                    environment = f"{PREFIX}/{stage}:{environment_tag(root, target, bases)}"
                    if not buildah.has(environment):
                        with step(f"dependencies of {target}"):
                            # How they were made is no use any more: they are found by their name.
                            _build(buildah, root, stage, environment, arguments)
                    note_use(store, environment)
                    arguments[stage.upper().replace("-", "_")] = environment
                if target in WITH_KERNELS:
                    arguments["KERNELS"] = kernels.ensure(store, buildah, library)
                with step(f"image {target}"):
                    note_use(store, reference, _build(buildah, root, target, reference, arguments))
                digest = ""
                if target in LOCAL_TARGETS:
                    with step(f"image {target} into the layout"):
                        digest = Layout(store.layout).add(store, buildah, reference)
                built[target] = Image(target, reference, digest)
                _record(store, built)
            # Another checkout's tests may read what it built last, and a version before it: they stay as long there.
            prune(store, buildah, pinned={base.REFERENCE, *_in_records(store)})
            Layout(store.layout).keep({name for image in stored(store) for name in image.names})
        for target in targets:
            note_use(store, built[target].reference)
            say(f"{target}: {built[target].reference}{'' if target in missing else ' (as built before)'}")
        return {target: built[target] for target in targets}


def recorded(store: Store) -> dict[str, Image]:
    """What this checkout built last, by target."""
    return {target: Image(**fields) for target, fields in _read(store.record).get(str(ROOT), {}).items()}


def _record(store: Store, built: dict[str, Image]) -> None:
    others = {checkout: images for checkout, images in _read(store.record).items() if Path(checkout).exists()}
    own = {target: asdict(image) for target, image in sorted(built.items())}
    partial = store.record.with_suffix(".partial")
    partial.write_text(json.dumps(others | {str(ROOT): own}, indent=1))
    partial.rename(store.record)


def _read(record: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Checkout -> target -> an image's fields."""
    return dict(json.loads(record.read_text())) if record.exists() else {}


def _in_records(store: Store) -> set[str]:
    """What any checkout, and any set of images, has as its current one."""
    records = [_read(path) for path in store.folder.glob("built*.json")]
    return {fields["reference"] for record in records for images in record.values() for fields in images.values()}


def _is_whole(store: Store, image: Image | None, wanted_tag: str) -> bool:
    if image is None or not image.reference.endswith(f":{wanted_tag}"):
        return False
    if image.target in LOCAL_TARGETS:
        return Layout(store.layout).is_whole(image.digest)
    return Buildah.on(store).has(image.reference)


def _build(buildah: Buildah, root: Path, target: str, reference: str, arguments: dict[str, str]) -> str:
    """Builds one target; what buildah said."""
    with scratch(buildah.store.scratch) as private:
        return buildah.run(
            f"image {target}",
            *("build", "--layers", "--pull=false", "--network", "host"),
            *(part for name, value in arguments.items() if value for part in ("--build-arg", f"{name}={value}")),
            *index.secrets(private.folder / "secrets"),
            *("--file", root / "Dockerfile", "--target", target, "--tag", reference, root),
        )

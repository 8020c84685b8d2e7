"""Old versions leave buildah's storage: of each image a few stay, those that were asked for last.

A version is an image with a name (`localhost/hpu-inference/operator:TAG`). A build also leaves nameless images, one per
step of the Dockerfile, which are buildah's cache: those stay that the build of a kept version went through. Clusters do
not notice: what their nodes were given is their own, by links to files that a name less does not remove.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.images.buildah import Buildah
from tests.images.errors import StepFailed
from tests.images.store import Store, say

KEPT_VERSIONS = 3
# So that no build waits long for it: a storage that is full of old images gets rid of them over some builds.
_AT_ONCE = 40
# A working container of that age belongs to a call that was killed.
_ABANDONED = timedelta(hours=1)
_LOG_BYTES = 4_000_000

# What buildah says after each step: `--> Using cache ID` or `--> ID`, the latter shortened.
_STEP = re.compile(r"^--> (?:Using cache )?([0-9a-f]{11,64})$", re.MULTILINE)


@dataclass(frozen=True)
class Stored:
    """An image in the storage. `created` is in seconds since the epoch."""

    name: str
    names: tuple[str, ...]
    created: float


@dataclass(frozen=True)
class Use:
    """When a version was asked for last, and the ids (perhaps shortened) of the steps that its build went through."""

    at: float
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What goes: `versions` by name, `steps` by id; newest first, so that nothing goes before what is made of it."""

    versions: tuple[str, ...]
    steps: tuple[str, ...]


def plan(images: Iterable[Stored], uses: Mapping[str, Use], pinned: Collection[str], keep: int = KEPT_VERSIONS) -> Plan:
    """Keeps `pinned` versions, and of each image the `keep` that were used last (made, where no use was noted)."""
    newest_first = sorted(images, key=lambda image: image.created, reverse=True)
    by_repository: dict[str, list[tuple[float, str]]] = {}
    for image in newest_first:
        for name in image.names:
            at = uses[name].at if name in uses else image.created
            by_repository.setdefault(name.rpartition(":")[0], []).append((at, name))
    kept = set(pinned).union(*({name for _, name in sorted(some)[-keep:]} for some in by_repository.values()))
    steps = tuple(step for name in kept if name in uses for step in uses[name].steps)
    return Plan(
        versions=tuple(name for image in newest_first for name in image.names if name not in kept),
        steps=tuple(
            image.name for image in newest_first if not kept & set(image.names) and not image.name.startswith(steps)
        ),
    )


def note_use(store: Store, reference: str, said: str = "") -> None:
    """Remember that a version was asked for; `said` is buildah's output if it was built just now."""
    uses = _uses(store)
    earlier = uses[reference].steps if reference in uses else ()
    uses[reference] = Use(time.time(), tuple(_STEP.findall(said)) or earlier)
    _write(store, uses)


def prune(store: Store, buildah: Buildah, pinned: Collection[str]) -> Plan:
    """Remove what `plan` says and say so; the caller holds the store's lock. What is in use right now stays."""
    _remove_abandoned_containers(store, buildah)
    _shorten_log(store)
    images = stored(store)
    going = plan(images, _uses(store), pinned)
    if not going.versions and not going.steps:
        return going
    before = _bytes(store)
    # A nameless image goes by its id. An image that has lost its last name has gone with it.
    named = {image.name for image in images if image.names}
    nameless = [step for step in going.steps if step not in named]
    for arguments in (going.versions[:_AT_ONCE], nameless[: max(0, _AT_ONCE - len(going.versions))]):
        if arguments:
            try:
                buildah.run("removing old images", "rmi", *arguments)
            except StepFailed:
                _remove_singly(store, buildah, arguments)
    left = {name for image in stored(store) for name in (image.name, *image.names)}
    _write(store, {name: use for name, use in _uses(store).items() if name in left})
    gone = [version for version in going.versions if version not in left]
    steps = sum(step not in left for step in going.steps)
    shown = ", ".join(name.rpartition("/")[2] for name in gone[:6]) + (" ..." if len(gone) > 6 else "")
    say(
        f"removed {len(gone)} old versions{f' ({shown})' if gone else ''} and {steps} old steps of builds: "
        f"{(before - _bytes(store)) / 1e6:.0f} MB"
    )
    return going


def _remove_singly(store: Store, buildah: Buildah, arguments: Iterable[str]) -> None:
    """One that is in use (by a container of another process) must not keep the others."""
    for argument in arguments:
        if any(argument in (image.name, *image.names) for image in stored(store)):
            try:
                buildah.run("removing an old image", "rmi", argument)
            except StepFailed:
                say(f"{argument} is in use; the next build removes it")


def stored(store: Store) -> list[Stored]:
    """Every image in buildah's storage."""
    return [
        Stored(entry["id"], tuple(entry.get("names") or ()), _seconds(entry["created"]))
        for entry in _read(store, "images")
    ]


def _remove_abandoned_containers(store: Store, buildah: Buildah) -> None:
    limit = (datetime.now(UTC) - _ABANDONED).timestamp()
    old = [entry["id"] for entry in _read(store, "containers") if _seconds(entry["created"]) < limit]
    if old:
        buildah.run("removing containers of killed builds", "rm", *old)


def _shorten_log(store: Store) -> None:
    if store.log.exists() and store.log.stat().st_size > _LOG_BYTES:
        store.log.write_bytes(store.log.read_bytes()[-_LOG_BYTES // 2 :])


def _bytes(store: Store) -> int:
    return sum(int(layer.get("diff-size", 0)) for layer in _read(store, "layers"))


def _read(store: Store, kind: str) -> list[dict[str, Any]]:
    file = store.storage / f"overlay-{kind}" / f"{kind}.json"
    return list(json.loads(file.read_text())) if file.exists() else []


def _seconds(text: str) -> float:
    # Nanoseconds, which Python does not read, are of no interest here.
    return datetime.fromisoformat(re.sub(r"\.\d+", "", text)).timestamp()


def _uses(store: Store) -> dict[str, Use]:
    if not store.uses.exists():
        return {}
    return {name: Use(at, tuple(steps)) for name, (at, steps) in json.loads(store.uses.read_text()).items()}


def _write(store: Store, uses: Mapping[str, Use]) -> None:
    partial = store.uses.with_suffix(".partial")
    partial.write_text(json.dumps({name: (use.at, use.steps) for name, use in sorted(uses.items())}))
    partial.rename(store.uses)

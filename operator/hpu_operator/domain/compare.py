"""Whether a live object is what we would apply. Two comparisons; a write only where one of them fails.

The hash of the manifest, kept in an annotation, detects a field that we no longer send. "Desired is a subset of live"
detects what another writer changed. What the API server adds (defaults, status, another manager's labels) is neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpu_operator.domain.names import MANIFEST_HASH_ANNOTATION

Manifest = dict[str, Any]

_LIST_KEYS = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
}
"""Lists that the API server merges by key: found by that key in the live list, wherever it stands there. `ports` has
a key as well, but ours are the only ones and stay in order."""


def digest(value: object) -> str:
    """A hash of any JSON value that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_hash(manifest: Manifest) -> Manifest:
    """`manifest` with its own hash in an annotation."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), MANIFEST_HASH_ANNOTATION: digest(manifest)[:16]}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def needs_apply(desired: Manifest, live: Mapping[str, Any] | None) -> bool:
    """Whether `desired` (from `with_hash`) has to be written."""
    return live is None or not is_subset(desired, live)


def is_subset(desired: object, live: object, field: str = "") -> bool:
    """Whether everything `desired` says is so in `live`. A zero value equals an absent one, as in the API's types."""
    if not desired and live is None:
        return True
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(is_subset(value, live.get(key), key) for key, value in desired.items())
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        if not isinstance(live, Sequence) or isinstance(live, str):
            return False
        if key := _LIST_KEYS.get(field):
            by_key = {item[key]: item for item in live if isinstance(item, Mapping) and key in item}
            return all(is_subset(item, by_key.get(item[key])) for item in desired)
        return len(desired) == len(live) and all(
            is_subset(mine, theirs) for mine, theirs in zip(desired, live, strict=True)
        )
    return bool(desired == live)

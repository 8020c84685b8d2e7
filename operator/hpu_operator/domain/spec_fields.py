"""Which field of the spec an engine's words are about: people write fields, containers speak of flags and mounts.

What a field is set to is read from the pod template the container was made from, so that a group of an older revision
is explained by its own settings. `template` is that template's pod spec; empty where it is not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpu_engine.contract import FailureReason, TerminationMessage
from hpu_operator.domain.desired import CONTAINER
from hpu_operator.domain.engine_arguments import MODEL_MOUNT

FIELD_OF_FLAG = {
    "model": "spec.model.uri",
    "served-model-name": "spec.model.servedName",
    "device": "spec.engine.device",
    "dtype": "spec.engine.dtype",
    "max-model-len": "spec.engine.maxModelLen",
    "max-num-seqs": "spec.engine.maxNumSeqs",
    "max-num-batched-tokens": "spec.engine.chunkedPrefill.maxBatchedTokens",
    "block-size": "spec.engine.blockSize",
    "tensor-parallel-size": "spec.parallelism.tensor",
    "data-parallel-size": "spec.parallelism.data",
    "expert-parallel-size": "spec.parallelism.expert",
    "drain-seconds": "spec.drainSeconds",
}
"""Fields behind the flags of `engine_arguments` that a user sets."""

OPERATORS_OWN = frozenset({"host", "port", "control-port", "lame-duck-seconds", "termination-log"})
"""Flags that no field of the spec sets."""

MEMORY_LIMIT = "spec.pod.resources.limits.memory"
NOT_SET = f"{MEMORY_LIMIT}, which is not set"
_VARIABLES = "spec.pod.env"

_ABOUT_THE_MODEL = {
    FailureReason.MODEL_NOT_FOUND,
    FailureReason.MODEL_BROKEN,
    FailureReason.MODEL_UNSUPPORTED,
}
_IN_ORDER = sorted(FIELD_OF_FLAG, key=len, reverse=True)
_SAID = re.compile(rf"(?:--|^)({'|'.join(_IN_ORDER)})(?![\w-])")
_BY_VARIABLE = re.compile(r"from HPU_ENGINE_[A-Z_]+|^(?:--)?(?:kv-cache-memory|num-kv-blocks|max-open-requests)\b")
"""A setting that came from a variable, or that has no field and can only come from one."""


def field_of(said: TerminationMessage, template: Mapping[str, Any]) -> str | None:
    """The field to look at, with what it is set to where that helps; None where no field is at fault."""
    if said.reason in _ABOUT_THE_MODEL:
        return _model(template)
    if said.reason not in (FailureReason.USAGE, FailureReason.INSUFFICIENT_MEMORY):
        return None
    if _BY_VARIABLE.search(said.message):
        return _VARIABLES
    if said.reason is FailureReason.INSUFFICIENT_MEMORY:
        return memory_limit(template)
    return _of_flag(said.message, template)


def _of_flag(message: str, template: Mapping[str, Any]) -> str | None:
    flag = _SAID.search(message)
    if flag is None:
        return None
    return _model(template) if flag[1] == "model" else FIELD_OF_FLAG[flag[1]]


def memory_limit(template: Mapping[str, Any]) -> str:
    """The limit's field and amount, or that it is not set; the field alone where the template is not known."""
    container = _engine(template)
    if not container:
        return MEMORY_LIMIT
    amount = ((container.get("resources") or {}).get("limits") or {}).get("memory")
    return f"{MEMORY_LIMIT} {amount}" if amount else NOT_SET


def _model(template: Mapping[str, Any]) -> str:
    field = FIELD_OF_FLAG["model"]
    words = (str(word) for word in _engine(template).get("args") or ())
    path = next((word.removeprefix("--model=") for word in words if word.startswith("--model=")), None)
    if path is None:
        return field
    path = path.replace("$$(", "$(")
    claim = _claim_of_the_model(template)
    if claim is None:
        return f"{field} (path {path} in the container)"
    inside = path.removeprefix(MODEL_MOUNT).strip("/")
    return f"{field} (claim {claim}, {f'path {inside}' if inside else 'its root'})"


def _claim_of_the_model(template: Mapping[str, Any]) -> str | None:
    mounts = _engine(template).get("volumeMounts") or ()
    volume = next((mount["name"] for mount in mounts if mount.get("mountPath") == MODEL_MOUNT), None)
    claims = (
        (item.get("persistentVolumeClaim") or {}).get("claimName")
        for item in template.get("volumes") or ()
        if volume is not None and item.get("name") == volume
    )
    return next((str(claim) for claim in claims if claim), None)


def _engine(template: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((item for item in template.get("containers") or () if item.get("name") == CONTAINER), {})

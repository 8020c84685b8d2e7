"""The command line of the engine, from the spec."""

from __future__ import annotations

from dataclasses import dataclass

from hpu_engine.contract import API_PORT, CONTROL_PORT
from hpu_operator.api.inference import Spec

LAME_DUCK_SECONDS = 10
"""How long a group that is told to stop still takes new requests, while its endpoints disappear everywhere."""

KILL_MARGIN_SECONDS = 10
"""From the end of the drain to SIGKILL: time to write the termination message and exit."""

TERMINATION_LOG = "/dev/termination-log"
MODEL_MOUNT = "/mnt/model"


@dataclass(frozen=True)
class ModelPlace:
    """Where the model is in the container, and the claim to mount there."""

    path: str
    claim: str | None


def model_place(uri: str) -> ModelPlace:
    """Where `uri` points. The whole claim is mounted, so that the engine can name a missing path."""
    scheme, _, rest = uri.partition("://")
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        return ModelPlace(f"{MODEL_MOUNT}/{path}".rstrip("/"), claim)
    return ModelPlace(rest, None)


def termination_grace_seconds(spec: Spec) -> int:
    return LAME_DUCK_SECONDS + spec.drain_seconds + KILL_MARGIN_SECONDS


def drain_seconds_of(grace_seconds: int) -> int:
    """How much of a pod's termination grace is for running requests."""
    return max(grace_seconds - LAME_DUCK_SECONDS - KILL_MARGIN_SECONDS, 0)


def engine_arguments(name: str, spec: Spec) -> list[str]:
    """Arguments of `hpu-engine`, each as one word, so that a value is never taken for a flag."""
    engine, parallel = spec.engine, spec.parallelism
    flags: list[tuple[str, object]] = [
        ("model", model_place(spec.model.uri).path),
        ("served-model-name", served_name(name, spec)),
        ("device", engine.device),
        ("dtype", engine.dtype),
        ("host", "0.0.0.0"),  # noqa: S104 - the pod's own network namespace
        ("port", API_PORT),
        ("control-port", CONTROL_PORT),
        ("max-model-len", engine.max_model_len),
        ("max-num-seqs", engine.max_num_seqs),
        ("max-num-batched-tokens", engine.chunked_prefill.max_batched_tokens),
        ("block-size", engine.block_size),
        ("tensor-parallel-size", parallel.tensor),
        ("data-parallel-size", parallel.data),
        ("expert-parallel-size", parallel.expert),
        ("lame-duck-seconds", LAME_DUCK_SECONDS),
        ("drain-seconds", spec.drain_seconds),
        ("termination-log", TERMINATION_LOG),
    ]
    return ["serve", *(f"--{flag}={_literal(value)}" for flag, value in flags if value is not None)]


def served_name(name: str, spec: Spec) -> str:
    return spec.model.served_name or name


def _literal(value: object) -> str:
    """Without Kubernetes' expansion of $(VARIABLE) in arguments."""
    return str(value).replace("$(", "$$(")

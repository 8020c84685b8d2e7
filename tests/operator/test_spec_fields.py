"""Words of a container are told with the field of the spec that they are about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from hpu_engine.contract import FailureReason, TerminationMessage
from hpu_operator.api.inference import Spec
from hpu_operator.domain.desired import render_record
from hpu_operator.domain.diagnosis.questions import diagnose_pod
from hpu_operator.domain.engine_arguments import engine_arguments
from hpu_operator.domain.names import GroupId, group_labels
from hpu_operator.domain.observed import read_groups
from hpu_operator.domain.spec_fields import FIELD_OF_FLAG, OPERATORS_OWN, field_of
from tests.operator.objects import NOW, OWNER, REVISION, pod, recorded, spec

EVERYTHING = {"engine": {"maxModelLen": 1024, "chunkedPrefill": {"maxBatchedTokens": 256}}}


def template(**changes: Any) -> Mapping[str, Any]:
    made: Mapping[str, Any] = render_record(OWNER, spec(**changes), REVISION, 1, "engine:1").template["spec"]
    return made


def test_every_flag_has_its_field_or_is_the_operators_own() -> None:
    flags = {word[2:].partition("=")[0] for word in engine_arguments("smol", spec(**EVERYTHING))[1:]}
    assert flags == set(FIELD_OF_FLAG) | OPERATORS_OWN


@pytest.mark.parametrize("path", FIELD_OF_FLAG.values())
def test_every_field_is_one_of_the_spec(path: str) -> None:
    node: Any = Spec.model_validate(spec(**EVERYTHING)).model_dump(mode="json", by_alias=True)
    for part in path.split(".")[1:]:
        node = node[part]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("max-model-len 100000 is outside of 2..8192 of this model", "spec.engine.maxModelLen"),
        ("--max-num-batched-tokens: 100 is too few", "spec.engine.chunkedPrefill.maxBatchedTokens"),
        ("--max-num-seqs: input should be at least 1; it was 0", "spec.engine.maxNumSeqs"),
        ("dtype float8 is not supported on the CPU", "spec.engine.dtype"),
        ("device 'tpu' is not supported", "spec.engine.device"),
        ("--block-size from HPU_ENGINE_BLOCK_SIZE: not a number", "spec.pod.env"),
        ("num-kv-blocks is 0; at least 1 is needed", "spec.pod.env"),
        ("--model /mnt/model/nope: no such directory", "spec.model.uri (claim models, path nope)"),
        ("something else is wrong with the model", None),
        ("--no-such-flag: unknown", None),
    ],
)
def test_settings_that_are_refused(message: str, field: str | None) -> None:
    said = TerminationMessage(reason=FailureReason.USAGE, message=message)
    assert field_of(said, template(model={"uri": "pvc://models/nope"})) == field


@pytest.mark.parametrize(
    ("uri", "field"),
    [
        ("pvc://models/llama/8b", "spec.model.uri (claim models, path llama/8b)"),
        ("pvc://models/", "spec.model.uri (claim models, its root)"),
        ("file:///opt/model", "spec.model.uri (path /opt/model in the container)"),
    ],
)
def test_a_model_is_told_as_the_user_wrote_it(uri: str, field: str) -> None:
    said = TerminationMessage(reason=FailureReason.MODEL_NOT_FOUND, message="no such directory")
    assert field_of(said, template(model={"uri": uri})) == field


def test_memory_that_does_not_suffice_names_the_limit_or_the_variable() -> None:
    few = TerminationMessage(reason=FailureReason.INSUFFICIENT_MEMORY, message="9 bytes are needed, 8 are available")
    limited = template(pod={"resources": {"limits": {"memory": "2Gi"}}})
    assert field_of(few, limited) == "spec.pod.resources.limits.memory 2Gi"
    cache = few.model_copy(update={"message": "kv-cache-memory of 1 bytes holds no block"})
    assert field_of(cache, limited) == "spec.pod.env"


def test_a_failure_of_a_worker_is_no_fields_fault() -> None:
    assert field_of(TerminationMessage(reason=FailureReason.WORKER_LOST, message="--model"), template()) is None


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        (
            {"resources": {"limits": {"memory": "2048Mi"}}},
            "killed at its memory limit (spec.pod.resources.limits.memory 2Gi; exit code 137)",
        ),
        ({}, "killed because its node ran out of memory (spec.pod.resources.limits.memory, which is not set;"),
    ],
)
def test_a_container_that_is_killed_for_memory_names_its_limit(resources: dict[str, Any], text: str) -> None:
    killed = replace(recorded("oom-killed"), template=template(pod=resources))
    diagnosis = diagnose_pod(killed, NOW)
    assert diagnosis is not None
    assert text in diagnosis.message


def test_pods_are_read_with_the_template_of_their_own_group() -> None:
    group = GroupId(0, REVISION, 0)
    live = {
        "metadata": {"name": "smol-0", "uid": "u", "labels": group_labels("smol", group)},
        "spec": {"replicas": 1, "template": {"spec": template()}},
    }
    (read,) = read_groups([live], [(group, pod())])
    assert read.pods[0].template == template()

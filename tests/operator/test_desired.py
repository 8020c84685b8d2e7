"""Manifests: golden files for whole objects, and the rules they must keep for any spec."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpu_operator.api.inference import Spec
from hpu_operator.domain import desired
from hpu_operator.domain.engine_arguments import engine_arguments, model_place
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.revision import record_manifest, revision_of
from tests.operator.objects import OWNER, spec

GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, dict[str, Any]] = {
    "smallest": {"model": {"uri": "pvc://models/smollm2"}},
    "everything": {
        "model": {"uri": "file:///data/Modelle/größe", "servedName": "Org/Model:v1.0_ü"},
        "replicas": 3,
        "drainSeconds": 300,
        "engine": {
            "dtype": "float32",
            "maxModelLen": 4096,
            "maxNumSeqs": 8,
            "blockSize": 64,
            "chunkedPrefill": {"maxBatchedTokens": 512},
        },
        "pod": {
            "image": "registry.example/engine:2",
            "imagePullPolicy": "Always",
            "imagePullSecrets": [{"name": "registry"}],
            "resources": {"requests": {"cpu": "1500m", "memory": "2048Mi"}, "limits": {"memory": "4096Mi"}},
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
                        ]
                    }
                }
            },
            "priorityClassName": "serving",
            "runtimeClassName": "gvisor",
            "env": [
                {"name": "LEVEL", "value": "debug"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
            ],
            "volumes": [{"name": "data", "emptyDir": {"sizeLimit": "1024Mi"}}],
            "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
            "labels": {"team": "nlp"},
            "annotations": {"note": "kept"},
        },
    },
}


def manifests(case: str) -> list[dict[str, Any]]:
    wanted = Spec.model_validate(CASES[case])
    revision = revision_of(wanted)
    record = desired.render_record(OWNER, wanted, revision, 1, "engine:default")
    group = desired.stateful_set(OWNER, GroupId(0, revision, 0), record)
    return [record_manifest(OWNER, record), desired.service(OWNER), desired.ranks_service(OWNER), group]


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    """Written anew with `GOLDEN=write`; a changed hash of a StatefulSet is a changed manifest, so look twice."""
    path = GOLDEN / f"{case}.yaml"
    text = yaml.safe_dump_all(manifests(case), sort_keys=True, allow_unicode=True, width=110)
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


def pod_spec(**changes: Any) -> dict[str, Any]:
    wanted = spec(**changes)
    record = desired.render_record(OWNER, wanted, "r", 1, "engine:default")
    result: dict[str, Any] = record.template["spec"]
    return result


def test_grace_is_lame_duck_drain_and_a_margin() -> None:
    assert pod_spec(drainSeconds=45)["terminationGracePeriodSeconds"] == 10 + 45 + 10


def test_pods_are_restricted_and_hold_no_token() -> None:
    pod = pod_spec()
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    container = pod["containers"][0]["securityContext"]
    assert container["readOnlyRootFilesystem"] is True
    assert container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}


def test_the_engine_says_why_it_died_where_the_kubelet_looks() -> None:
    container = pod_spec()["containers"][0]
    assert f"--termination-log={container['terminationMessagePath']}" in container["args"]


def test_absent_settings_are_left_to_the_engine() -> None:
    flags = {argument.split("=")[0] for argument in engine_arguments("smol", spec())}
    assert not {"--max-num-batched-tokens", "--max-model-len"} & flags


@pytest.mark.parametrize("name", ["Org/Model:v1.0", "模型", "--model=/etc", "a b", "Модель_2"])
def test_any_served_name_is_one_argument(name: str) -> None:
    arguments = engine_arguments("smol", spec(model={"uri": "file:///m", "servedName": name}))
    assert f"--served-model-name={name}" in arguments


def test_kubernetes_expands_no_variable_in_a_name() -> None:
    arguments = engine_arguments("smol", spec(model={"uri": "file:///m", "servedName": "$(HOME)"}))
    assert "--served-model-name=$$(HOME)" in arguments


@pytest.mark.parametrize(
    ("uri", "path", "claim"),
    [
        ("pvc://models/smollm2", "/mnt/model/smollm2", "models"),
        ("pvc://models", "/mnt/model", "models"),
        ("pvc://models/", "/mnt/model", "models"),
        ("pvc://my.claim/a/b", "/mnt/model/a/b", "my.claim"),
        ("file:///data/model", "/data/model", None),
    ],
)
def test_where_the_model_is(uri: str, path: str, claim: str | None) -> None:
    place = model_place(uri)
    assert (place.path, place.claim) == (path, claim)


def test_a_group_is_made_from_its_record_and_nothing_else() -> None:
    record = desired.render_record(OWNER, spec(), "r", 1, "engine:recorded")
    made = desired.stateful_set(OWNER, GroupId(4, "r", 2), record)
    assert made["metadata"]["name"] == "smol-r-4-2"
    template = made["spec"]["template"]
    assert template["spec"] == record.template["spec"]
    assert set(made["spec"]["selector"]["matchLabels"].items()) < set(template["metadata"]["labels"].items())
    assert "serving.hpu.dev/in-service" not in made["spec"]["selector"]["matchLabels"]


def test_a_variable_of_ours_that_the_user_sets_is_the_users_and_there_only_once() -> None:
    variables = pod_spec(pod={"env": [{"name": "HOME", "value": "/data"}]})["containers"][0]["env"]
    assert variables == [{"name": "HOME", "value": "/data"}]


def test_a_pod_leaves_service_by_its_own_label_and_no_other_pod_does() -> None:
    left = desired.service_label("team", "smol-0", "uid", "2026-11-30T12:00:00Z")
    back = desired.service_label("team", "smol-0", "uid", None)
    assert left["metadata"]["uid"] == back["metadata"]["uid"] == "uid"
    assert left["metadata"]["labels"] == {"serving.hpu.dev/in-service": "false"}
    assert back["metadata"]["labels"] == {"serving.hpu.dev/in-service": "true"}
    assert "annotations" not in back["metadata"]

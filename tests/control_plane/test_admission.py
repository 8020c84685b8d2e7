"""What the API server itself refuses, with messages that name the field and what would be right: all but the pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hpu_operator.kube.kinds import INFERENCE
from hpu_operator.kube.port import KubeError
from tests.cluster.handle import ControlPlane
from tests.control_plane.admin import Admin
from tests.control_plane.conftest import inference


def budget(tokens: int, **engine: Any) -> dict[str, Any]:
    return {"engine": {"chunkedPrefill": {"maxBatchedTokens": tokens}} | engine}


# Name of the object, top-level fields of its spec, and words that the answer must contain.
INVALID: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("name of 64 characters", "a" * 64, {}, ["metadata.name", "at most 63 characters"]),
    ("name of 253 characters", "a" * 253, {}, ["metadata.name", "at most 63 characters"]),
    ("name with dots", "my.model", {}, ["metadata.name", "without dots", "at most 63 characters"]),
    ("name that starts with a digit", "8b-model", {}, ["metadata.name", "starting with a letter"]),
    ("name with our own suffix", "smol-ranks", {}, ["metadata.name", "must not end in -ranks"]),
    ("no model", "m", {"model": None}, ["spec.model", "Required value"]),
    ("no uri", "m", {"model": {}}, ["spec.model.uri", "Required value"]),
    ("empty uri", "m", {"model": {"uri": ""}}, ["spec.model.uri", "pvc://CLAIM/PATH"]),
    (
        "unknown scheme",
        "m",
        {"model": {"uri": "s3://bucket/x"}},
        ["spec.model.uri", "pvc://CLAIM/PATH", "file:///PATH"],
    ),
    ("hub name", "m", {"model": {"uri": "meta/llama"}}, ["spec.model.uri", "pvc://CLAIM/PATH"]),
    ("claim with capitals", "m", {"model": {"uri": "pvc://Models/x"}}, ["spec.model.uri", "PersistentVolumeClaim"]),
    ("relative file", "m", {"model": {"uri": "file://x"}}, ["spec.model.uri", "file:///PATH"]),
    ("path that climbs", "m", {"model": {"uri": "pvc://models/../x"}}, ["spec.model.uri", "must not contain .."]),
    ("control character in uri", "m", {"model": {"uri": "file:///a\nb"}}, ["spec.model.uri", "control characters"]),
    ("claim of two dots", "m", {"model": {"uri": "pvc://a..b/x"}}, ["spec.model.uri", "PersistentVolumeClaim"]),
    ("long claim", "m", {"model": {"uri": f"pvc://{'a' * 254}/x"}}, ["spec.model.uri", "at most 253 characters"]),
    ("space after the path", "m", {"model": {"uri": "pvc://models/x "}}, ["spec.model.uri", "end with a space"]),
    ("long uri", "m", {"model": {"uri": "file:///" + "a" * 2000}}, ["spec.model.uri", "1024"]),
    ("empty served name", "m", {"model": {"uri": "file:///m", "servedName": ""}}, ["servedName", "at least 1"]),
    ("served name of spaces", "m", {"model": {"uri": "file:///m", "servedName": " x"}}, ["servedName", "space"]),
    (
        "control character in name",
        "m",
        {"model": {"uri": "file:///m", "servedName": "a\tb"}},
        ["servedName", "control"],
    ),
    (
        "line break of another script",
        "m",
        {"model": {"uri": "file:///m", "servedName": "a\u2028b"}},
        ["servedName", "line breaks"],
    ),
    ("terminal escape", "m", {"model": {"uri": "file:///m", "servedName": "a\u009bb"}}, ["servedName", "control"]),
    ("unknown field", "m", {"modell": {}}, ["modell", "unknown field"]),
    ("unknown nested field", "m", {"engine": {"blocksize": 128}}, ["blocksize", "unknown field"]),
    ("negative replicas", "m", {"replicas": -1}, ["spec.replicas", "greater than or equal to 0"]),
    ("too many replicas", "m", {"replicas": 1001}, ["spec.replicas", "less than or equal to 1000"]),
    ("replicas as text", "m", {"replicas": "two"}, ["spec.replicas", "integer"]),
    ("tensor 2", "m", {"parallelism": {"tensor": 2}}, ["spec.parallelism.tensor", "use 1"]),
    ("data 2", "m", {"parallelism": {"data": 2}}, ["spec.parallelism.data", "use 1"]),
    ("expert 8", "m", {"parallelism": {"expert": 8}}, ["spec.parallelism.expert", "use 1"]),
    ("cards per pod 8", "m", {"parallelism": {"cardsPerPod": 8}}, ["spec.parallelism.cardsPerPod", "use 1"]),
    ("tensor 0", "m", {"parallelism": {"tensor": 0}}, ["spec.parallelism.tensor", "greater than or equal to 1"]),
    ("device hpu", "m", {"engine": {"device": "hpu"}}, ["spec.engine.device", '"cpu"']),
    ("dtype int4", "m", {"engine": {"dtype": "int4"}}, ["spec.engine.dtype", '"bfloat16"', '"float32"']),
    ("block size 100", "m", {"engine": {"blockSize": 100}}, ["spec.engine.blockSize", '"128"']),
    ("no sequence", "m", {"engine": {"maxNumSeqs": 0}}, ["spec.engine.maxNumSeqs", "greater than or equal to 1"]),
    ("no length", "m", {"engine": {"maxModelLen": 0}}, ["spec.engine.maxModelLen", "greater than or equal to 1"]),
    ("budget below the block size", "m", budget(64), ["maxBatchedTokens 64", "below blockSize", "use 128"]),
    ("budget not a multiple", "m", budget(300), ["maxBatchedTokens 300", "not a multiple", "use 256"]),
    ("budget nearer above", "m", budget(330), ["maxBatchedTokens 330", "not a multiple", "use 384"]),
    (
        "budget above what can be filled",
        "m",
        budget(1024, maxModelLen=100, maxNumSeqs=2),
        ["maxBatchedTokens 1024", "maxModelLen x maxNumSeqs", "use at most 256"],
    ),
    ("drain for ever", "m", {"drainSeconds": 100000}, ["spec.drainSeconds", "less than or equal to 3600"]),
]

VALID: list[tuple[str, str, dict[str, Any]]] = [
    ("name of 1 character", "a", {}),
    ("name of 40 characters", "a" * 40, {}),
    ("name of 52 characters", "b" * 52, {}),
    ("name of 63 characters", "c" * 63, {}),
    ("served name with / : . _ and capitals", "m", {"model": {"uri": "file:///m", "servedName": "Org/Model:v1.0_a"}}),
    ("served name in another script", "m", {"model": {"uri": "file:///m", "servedName": "模型-Модель"}}),
    ("path in another script", "m", {"model": {"uri": "pvc://my.claim/größe/模型"}}),
    ("claim without a path", "m", {"model": {"uri": "pvc://models"}}),
    ("no replicas", "m", {"replicas": 0}),
    ("budget of one block", "m", budget(128)),
    ("budget that fills short sequences", "m", budget(256, maxModelLen=100, maxNumSeqs=2)),
    ("parallelism of one", "m", {"parallelism": {"tensor": 1, "data": 1, "expert": 1, "cardsPerPod": 1}}),
]


@pytest.fixture(autouse=True)
def _installed(crd: None) -> None:
    """Every test here needs the CRD."""


@pytest.mark.parametrize(("name", "spec", "words"), [case[1:] for case in INVALID], ids=[case[0] for case in INVALID])
async def test_refused_with_field_and_remedy(admin: Admin, name: str, spec: dict[str, Any], words: list[str]) -> None:
    body = inference(name, **spec)
    body["spec"] = {key: value for key, value in body["spec"].items() if value is not None}
    with pytest.raises(KubeError) as refused:
        await admin.create(INFERENCE, "default", body, dryRun="All", fieldValidation="Strict")
    assert refused.value.status in (400, 422)
    for word in words:
        assert word in refused.value.message, refused.value.message


@pytest.mark.parametrize(("name", "spec"), [case[1:] for case in VALID], ids=[case[0] for case in VALID])
async def test_accepted(admin: Admin, name: str, spec: dict[str, Any]) -> None:
    await admin.create(INFERENCE, "default", inference(name, **spec), dryRun="All", fieldValidation="Strict")


async def test_defaults_are_shown(admin: Admin, namespace: str) -> None:
    live = await admin.create(INFERENCE, namespace, inference())
    assert live["spec"]["replicas"] == 1
    assert live["spec"]["drainSeconds"] == 60
    assert live["spec"]["engine"]["blockSize"] == 128
    assert live["spec"]["parallelism"] == {"tensor": 1, "data": 1, "expert": 1}


def test_kubectl_apply_shows_the_message_and_the_columns(control_plane: ControlPlane, namespace: str) -> None:
    refused = yaml.safe_dump(inference(**budget(300)))
    with pytest.raises(Exception, match="use 256"):
        control_plane.kubectl("-n", namespace, "apply", "-f", "-", stdin=refused)
    control_plane.kubectl("-n", namespace, "apply", "-f", "-", stdin=yaml.safe_dump(inference()))
    shown = control_plane.kubectl("-n", namespace, "get", "hpu")
    head = shown.splitlines()[0].split()
    assert head == ["NAME", "READY", "REASON", "DESIRED", "READY", "COUNT", "WARM-UP", "MODEL", "AGE"]


def test_the_examples_are_accepted(control_plane: ControlPlane) -> None:
    examples = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
    for path in examples:
        control_plane.kubectl("apply", "--dry-run=server", "-f", str(path))
    assert examples

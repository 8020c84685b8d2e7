"""What `spec.pod` may say: what a pod would be refused for, or a node would stumble over, is refused at once."""

from __future__ import annotations

from typing import Any

import pytest

from hpu_operator.api.inference import Spec
from hpu_operator.domain import desired
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.owner import Owner
from hpu_operator.domain.revision import revision_of
from hpu_operator.kube.kinds import INFERENCE, POD, STATEFUL_SET
from hpu_operator.kube.port import KubeError
from tests.control_plane.admin import Admin
from tests.control_plane.conftest import inference
from tests.control_plane.test_admission import INVALID as INVALID_ELSEWHERE

GiB = 1 << 30
Pod = dict[str, Any]
FIELD = {"fieldRef": {"fieldPath": "metadata.name"}}
KEY = {"secretKeyRef": {"name": "hub", "key": "token"}}


def limits(**amounts: Any) -> Pod:
    return {"resources": {"limits": amounts}}


def cards(requests: Any, limit: Any) -> Pod:
    both = {"requests": {"habana.ai/gaudi": requests}, "limits": {"habana.ai/gaudi": limit}}
    return {"resources": {kind: amounts for kind, amounts in both.items() if None not in amounts.values()}}


def env(**variable: Any) -> Pod:
    return {"env": [{"name": "A"} | variable]}


def volume(source: dict[str, Any], **mount: Any) -> Pod:
    return {"volumes": [{"name": "x", **source}], "volumeMounts": [{"name": "x", "mountPath": "/x"} | mount]}


def mount(path: str) -> Pod:
    return volume({"emptyDir": {}}, mountPath=path)


def node_affinity(**requirement: Any) -> Pod:
    terms = [{"matchExpressions": [{"key": "zone"} | requirement]}]
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    }


def near(**term: Any) -> Pod:
    terms = [{"topologyKey": "kubernetes.io/hostname"} | term]
    return {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}


# What is wrong, `spec.pod`, and words that the answer must contain.
INVALID: list[tuple[str, Pod, list[str]]] = [
    ("empty image", {"image": ""}, ["spec.pod.image", "at least 1"]),
    ("image of words", {"image": "not a ref!"}, ["spec.pod.image", "not an image: write [HOST[:PORT]/]REPOSITORY"]),
    ("image with a scheme", {"image": "https://registry/x:1"}, ["spec.pod.image", "without a scheme"]),
    ("image in capitals", {"image": "registry/Engine:1"}, ["spec.pod.image", "the repository in lower case"]),
    ("image without its tag", {"image": "engine:"}, ["spec.pod.image", "[:TAG]"]),
    ("image with half a digest", {"image": "engine@sha256:abc"}, ["spec.pod.image", "[@sha256:DIGEST]"]),
    ("image with a space before", {"image": " engine:1"}, ["spec.pod.image", "not an image"]),
    ("policy Sometimes", {"imagePullPolicy": "Sometimes"}, ["imagePullPolicy", '"IfNotPresent"']),
    (
        "secret in capitals",
        {"imagePullSecrets": [{"name": "Hub"}]},
        ["imagePullSecrets[0].name", "use a-z, 0-9, - and ."],
    ),
    ("memory lots", limits(memory="lots"), ["spec.pod.resources.limits", "not a quantity", "16Gi"]),
    ("memory with a space", limits(memory="2 Gi"), ["spec.pod.resources.limits", "not a quantity"]),
    ("negative memory", limits(memory="-1Gi"), ["spec.pod.resources.limits", "must not be negative"]),
    ("endless memory", limits(memory="1e30"), ["spec.pod.resources.limits", "at most 1E"]),
    ("memory of many digits", limits(memory="9" * 20), ["spec.pod.resources.limits", "at most 1E"]),
    ("resource without a domain", limits(gpu=1), ["spec.pod.resources.limits", '"gpu"', "habana.ai/gaudi"]),
    ("resource with a space", limits(**{"c p u": 1}), ["spec.pod.resources.limits", '"c p u"', "cpu, memory"]),
    ("half a card", limits(**{"habana.ai/gaudi": "500m"}), ["spec.pod.resources.limits", "use a whole number"]),
    ("card requested alone", cards(1, None), ["spec.pod.resources", "set limits, and leave requests out"]),
    ("cards requested otherwise", cards(1, 2), ["spec.pod.resources", "set limits, and leave requests out"]),
    (
        "request above limit",
        {"resources": {"requests": {"cpu": 4}, "limits": {"cpu": "3500m"}}},
        ["spec.pod.resources", "request is above its limit"],
    ),
    ("selector with a bad key", {"nodeSelector": {"a b": "x"}}, ["spec.pod.nodeSelector", '"a b"', "example.com/team"]),
    ("selector with a bad value", {"nodeSelector": {"a": "x y"}}, ["spec.pod.nodeSelector", "use letters, digits"]),
    ("toleration of nothing", {"tolerations": [{}]}, ["spec.pod.tolerations[0]", "name a key, or use Exists"]),
    (
        "toleration with a value too many",
        {"tolerations": [{"key": "a", "operator": "Exists", "value": "x"}]},
        ["spec.pod.tolerations[0]", "remove it, or use Equal"],
    ),
    (
        "toleration with a bad key",
        {"tolerations": [{"key": "a b"}]},
        ["spec.pod.tolerations[0].key", "example.com/team"],
    ),
    (
        "toleration by comparison",
        {"tolerations": [{"key": "a", "operator": "Lt"}]},
        ["tolerations[0].operator", '"Equal"'],
    ),
    (
        "toleration for a time",
        {"tolerations": [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 5}]},
        ["spec.pod.tolerations[0]", "needs effect NoExecute"],
    ),
    ("In without values", node_affinity(operator="In"), ["matchExpressions[0]", "need values: add at least one"]),
    ("Exists with values", node_affinity(operator="Exists", values=["a"]), ["matchExpressions[0]", "take no values"]),
    ("Gt of a word", node_affinity(operator="Gt", values=["x"]), ["matchExpressions[0]", "one whole number"]),
    ("topology with a space", near(topologyKey="a b"), ["topologyKey", "example.com/team"]),
    ("namespace in capitals", near(namespaces=["Team"]), ["namespaces[0]", "not the name of a namespace"]),
    ("keys without a selector", near(matchLabelKeys=["a"]), ["labelSelector: add one"]),
    (
        "priority class of words",
        {"priorityClassName": "Very High"},
        ["spec.pod.priorityClassName", "use a-z, 0-9, - and ."],
    ),
    (
        "runtime class of words",
        {"runtimeClassName": "Very Fast"},
        ["spec.pod.runtimeClassName", "use a-z, 0-9, - and ."],
    ),
    ("number as variable", env(value=1), ["spec.pod.env[0].value", "string"]),
    ("variable twice", {"env": [{"name": "A"}, {"name": "A"}]}, ["spec.pod.env[1]", "Duplicate value"]),
    ("variable with =", env(name="A=B"), ["spec.pod.env[0].name", "use letters, digits"]),
    ("variable that begins with a digit", env(name="1A"), ["spec.pod.env[0].name", "not beginning with a digit"]),
    ("variable with NUL", env(value="a\0b"), ["spec.pod.env[0].value", "NUL"]),
    ("value and source", env(value="x", valueFrom=FIELD), ["spec.pod.env[0]", "not both: remove one"]),
    ("no source of a value", env(valueFrom={}), ["spec.pod.env[0].valueFrom", "exactly one source"]),
    ("two sources of a value", env(valueFrom=FIELD | KEY), ["spec.pod.env[0].valueFrom", "exactly one source"]),
    ("unknown pod field", env(valueFrom={"fieldRef": {"fieldPath": "spec.x"}}), ["fieldPath", "use metadata.name"]),
    ("unknown resource", env(valueFrom={"resourceFieldRef": {"resource": "limits.x"}}), ["resource", "use limits.cpu"]),
    (
        "key with a space",
        env(valueFrom={"secretKeyRef": {"name": "hub", "key": "a b"}}),
        ["secretKeyRef.key", "not the key of a Secret or ConfigMap"],
    ),
    ("a thousand variables", {"env": [{"name": f"A{n}"} for n in range(1000)]}, ["spec.pod.env", "at most 128 items"]),
    (
        "a megabyte of variables",
        {"env": [{"name": f"A{n}", "value": "x" * 32000} for n in range(32)]},
        ["spec.pod.env", "at most 131072 characters in all", "mount a ConfigMap"],
    ),
    ("mount without volume", {"volumeMounts": [{"name": "x", "mountPath": "/x"}]}, ["volumeMounts", "add it"]),
    ("mount over the model", mount("/mnt/model/x"), ["mountPath", "use another path"]),
    ("mount over the model's parent", mount("/mnt"), ["mountPath", "use another path, such as /data"]),
    ("mount over everything", mount("/"), ["mountPath", "use another path, such as /data"]),
    ("mount over devices", mount("/dev/termination-log"), ["mountPath", "use another path, such as /data"]),
    ("mount around a corner", mount("/x/../tmp"), ["mountPath", "must be written out"]),
    ("mount with two slashes", mount("//tmp"), ["mountPath", "must be written out"]),
    ("part of a volume that climbs", volume({"emptyDir": {}}, subPath="../x"), ["subPath", "without .."]),
    ("two sources", {"volumes": [{"name": "x", "emptyDir": {}, "hostPath": {"path": "/"}}]}, ["exactly one"]),
    ("no source", {"volumes": [{"name": "x"}]}, ["spec.pod.volumes[0]", "exactly one source"]),
    ("unknown source", {"volumes": [{"name": "x", "gitRepo": {}}]}, ["gitRepo", "unknown field"]),
    ("volume in capitals", {"volumes": [{"name": "X", "emptyDir": {}}]}, ["volumes[0].name", "use a-z, 0-9 and -"]),
    ("our volume", {"volumes": [{"name": "hpu-model", "emptyDir": {}}]}, ["volumes[0].name", "another name"]),
    (
        "claim of words",
        volume({"persistentVolumeClaim": {"claimName": "My Claim"}}),
        ["claimName", "use a-z, 0-9, - and ."],
    ),
    ("relative path of a node", volume({"hostPath": {"path": "x"}}), ["hostPath.path", "begin with /"]),
    ("unknown kind of path", volume({"hostPath": {"path": "/x", "type": "Folder"}}), ["hostPath.type", '"Directory"']),
    ("relative export", volume({"nfs": {"server": "nas", "path": "x"}}), ["nfs.path", "begin with /"]),
    ("artifact of words", volume({"image": {"reference": "not a ref!"}}), ["image.reference", "not an image"]),
    (
        "file outside of its volume",
        volume({"configMap": {"name": "a", "items": [{"key": "a", "path": "../b"}]}}),
        ["items[0].path", "without .."],
    ),
    ("negative size", volume({"emptyDir": {"sizeLimit": "-1"}}), ["sizeLimit", "must not be negative"]),
    ("our label", {"labels": {"serving.hpu.dev/name": "x"}}, ["spec.pod.labels", "use another prefix"]),
    ("label with a space", {"labels": {"a": "b c"}}, ["spec.pod.labels", "use letters, digits"]),
    ("label with a long key", {"labels": {"a" * 64: "b"}}, ["spec.pod.labels", "at most 63"]),
    ("our annotation", {"annotations": {"serving.hpu.dev/x": "y"}}, ["spec.pod.annotations", "prefix"]),
    ("annotation with a bad key", {"annotations": {"a b": "y"}}, ["spec.pod.annotations", '"a b"', "example.com/team"]),
    (
        "a megabyte of annotations",
        {"annotations": {f"a{n}": "x" * 32000 for n in range(32)}},
        ["spec.pod.annotations", "at most 65536 characters in all", "mount a ConfigMap"],
    ),
]

VALID: list[tuple[str, Pod]] = [
    ("memory 2048Mi", limits(memory="2048Mi")),
    ("memory 2Gi", limits(memory="2Gi")),
    ("memory 1e3", limits(memory="1e3")),
    ("memory as a number", limits(memory=GiB)),
    ("the most", limits(memory="1E", cpu="1E")),
    ("next to nothing", limits(cpu="0.0000000000001", memory="100m")),
    ("cards", limits(**{"habana.ai/gaudi": 8}) | {"labels": {"example.com/team": "nlp"}}),
    ("cards requested as limited", cards(8, 8)),
    ("huge pages", limits(**{"hugepages-2Mi": "4Mi", "memory": "1Gi"})),
    ("image by name", {"image": "engine"}),
    ("image of a registry", {"image": "registry.example.com:5000/hpu/engine-cpu:1.0_a-B"}),
    ("image by digest", {"image": f"[2001:db8::1]:5000/a__b/c.d@sha256:{'0' * 64}"}),
    ("image of this machine", {"image": "localhost/x:latest"}),
    ("every taint", {"tolerations": [{"operator": "Exists"}]}),
    (
        "one taint",
        {"tolerations": [{"key": "habana.ai/gaudi", "value": "x", "effect": "NoExecute", "tolerationSeconds": 5}]},
    ),
    ("nodes of a zone", node_affinity(operator="In", values=["a", "b"])),
    ("large nodes", node_affinity(operator="Gt", values=["7"])),
    ("near its like", near(labelSelector={"matchLabels": {"app": "x"}}, matchLabelKeys=["a"], namespaces=["team-a"])),
    (
        "variables",
        {"env": [{"name": "a.b-C", "value": "模型 $(HOME)"}, {"name": "B"}, {"name": "C", "valueFrom": KEY}]},
    ),
    ("a label as a variable", env(valueFrom={"fieldRef": {"fieldPath": "metadata.labels['example.com/team']"}})),
    ("its memory as a variable", env(valueFrom={"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}})),
    ("as many variables as may be", {"env": [{"name": f"A{n}", "value": "模" * 1024} for n in range(128)]}),
    ("as many annotations as may be", {"annotations": {f"a{n}": "x" * 2048 for n in range(32)}}),
    (
        "a folder of a node",
        volume({"hostPath": {"path": "/models", "type": "Directory"}}, subPath="a/..b", readOnly=True),
    ),
    (
        "a file of a Secret",
        volume({"secret": {"secretName": "hub", "items": [{"key": "a.b", "path": "c/d", "mode": 256}]}}),
    ),
    ("an artifact", volume({"image": {"reference": "registry.example.com/models/x:1"}})),
]


@pytest.fixture(autouse=True)
def _installed(crd: None) -> None:
    """Every test here needs the CRD."""


def test_there_are_more_than_fifty() -> None:
    assert len(INVALID) + len(INVALID_ELSEWHERE) > 50


@pytest.mark.parametrize(("pod", "words"), [case[1:] for case in INVALID], ids=[case[0] for case in INVALID])
async def test_refused_with_field_and_remedy(admin: Admin, pod: Pod, words: list[str]) -> None:
    with pytest.raises(KubeError) as refused:
        await admin.create(INFERENCE, "default", inference(pod=pod), dryRun="All", fieldValidation="Strict")
    assert refused.value.status in (400, 422)
    for word in words:
        assert word in refused.value.message, refused.value.message


@pytest.mark.parametrize("pod", [case[1] for case in VALID], ids=[case[0] for case in VALID])
async def test_accepted_and_so_are_the_group_and_the_pods_made_of_it(admin: Admin, pod: Pod) -> None:
    live = await admin.create(INFERENCE, "default", inference(pod=pod), dryRun="All", fieldValidation="Strict")
    spec = Spec.model_validate(live["spec"])
    owner = Owner("default", "smol", live["metadata"]["uid"])
    record = desired.render_record(owner, spec, revision_of(spec), 1, "engine:test")
    group = desired.stateful_set(owner, GroupId(0, record.revision, 0), record)
    stored = await admin.create(STATEFUL_SET, "default", group, dryRun="All", fieldValidation="Strict")
    assert stored["spec"]["template"]["spec"]["containers"][0].get("resources", {}).get("limits") == (
        group["spec"]["template"]["spec"]["containers"][0].get("resources", {}).get("limits")
    ), "an amount is spelled as the API server spells it"
    template = group["spec"]["template"]
    alone = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template["metadata"], "name": "x"}}
    await admin.create(POD, "default", alone, dryRun="All", fieldValidation="Strict")

"""What the chart renders is valid for every supported Kubernetes, and says what the values asked for."""

from __future__ import annotations

import itertools
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from hpu_operator.cli import app
from tests.chart.rendering import (
    CHART,
    CLUSTER_SCOPED,
    GENERATED_CRD,
    KUBE,
    HelmRefused,
    Manifest,
    helm,
    of_kind,
    only,
    render,
)

KUBERNETES = ("1.29", "1.31", "1.33", "1.35", "1.37")

EVERYTHING: Manifest = {
    "replicas": 2,
    "image": {
        "repository": "registry.example:5000/hpu/operator",
        "digest": "sha256:" + "a" * 64,
        "pullPolicy": "Always",
    },
    "imagePullSecrets": [{"name": "registry"}],
    "engine": {"images": {"cpu": {"repository": "registry.example:5000/hpu/engine-cpu", "tag": "9"}}},
    "podDisruptionBudget": {"enabled": True},
    "podAnnotations": {"example.com/a": "b"},
    "podLabels": {"team": "x", "app.kubernetes.io/name": "someone-else"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "serviceAccount": {"annotations": {"example.com/role": "r"}},
}
MATRIX: list[Manifest] = [
    {
        "watchNamespaces": namespaces,
        "crds": {"install": crds},
        "rbac": {"create": rbac},
        "metrics": {"service": {"enabled": metrics}},
    }
    for namespaces, crds, rbac, metrics in itertools.product(([], ["team-a", "team-b"]), *[(True, False)] * 3)
] + [EVERYTHING]


def test_helm_lint_finds_nothing() -> None:
    for values in ({}, EVERYTHING):
        report = helm("lint", str(CHART), "--strict", "--values", "-", stdin=yaml.safe_dump(values))
        assert "0 chart(s) failed" in report


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_combination_is_valid_for_kubernetes(version: str) -> None:
    for values in MATRIX if version == KUBERNETES[-1] else ({}, {"watchNamespaces": ["team-a"]}, EVERYTHING):
        manifests = render(values, kube=f"{version}.0" if version != KUBERNETES[-1] else KUBE)
        for manifest in of_kind(manifests, *{item["kind"] for item in manifests} - {"CustomResourceDefinition"}):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validator_refuses_a_field_that_kubernetes_does_not_have() -> None:
    deployment = only(render(), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES[-1], strict=True)


def test_an_older_kubernetes_is_refused_by_name() -> None:
    with pytest.raises(HelmRefused, match=r">=1\.29"):
        render(kube="1.28.0")


def test_every_namespaced_manifest_names_its_namespace_and_every_cluster_scoped_one_does_not() -> None:
    for values in MATRIX:
        expected = {"hpu-system", *values.get("watchNamespaces", ())}
        for manifest in render(values):
            namespace = manifest["metadata"].get("namespace")
            assert namespace in ({None} if manifest["kind"] in CLUSTER_SCOPED else expected), manifest


def test_the_definition_is_the_generated_one_and_is_kept() -> None:
    rendered, generated = only(render(), "CustomResourceDefinition"), yaml.safe_load(GENERATED_CRD.read_text())
    assert rendered["spec"] == generated["spec"]
    assert rendered["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert rendered["metadata"]["name"] == generated["metadata"]["name"]
    assert not of_kind(render({"crds": {"install": False}}), "CustomResourceDefinition")


def test_the_copy_in_the_chart_has_not_drifted() -> None:
    copy = CHART / "files" / "hpuinferences.yaml"
    assert copy.read_text() == GENERATED_CRD.read_text(), (
        "run: cp crds/*.yaml charts/hpu-operator/files/hpuinferences.yaml"
    )


def test_the_operator_pod_is_restricted_and_its_root_is_read_only() -> None:
    pod = only(render(), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_selectors_match_the_pods_whatever_labels_the_user_adds() -> None:
    manifests = render(EVERYTHING)
    deployment = only(manifests, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        only(manifests, "Service")["spec"]["selector"],
        only(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        deployment["spec"]["template"]["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ]
    assert labels["team"] == "x"
    for selector in selectors:
        assert selector
        assert selector.items() <= labels.items()
        assert not any("version" in key or "chart" in key for key in selector), "an upgrade cannot change a selector"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({}, "hpu-inference/operator:0.1.0"),
        ({"repository": "r.example:5000/o"}, "r.example:5000/o:0.1.0"),
        ({"repository": "r.example/o", "tag": "7"}, "r.example/o:7"),
        ({"repository": "r.example/o", "tag": "7", "digest": "sha256:" + "0" * 64}, "r.example/o@sha256:" + "0" * 64),
    ],
)
def test_an_image_is_its_digest_or_its_tag_or_the_version_of_the_chart(image: dict[str, str], expected: str) -> None:
    (container,) = only(render({"image": image}), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == expected


def test_names_fit_for_the_longest_release_name() -> None:
    for release in ("a", "hpu-operator", "r" * 53):
        for manifest in render(EVERYTHING, release=release):
            assert len(manifest["metadata"]["name"]) <= 63
            assert re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])


def test_two_releases_in_two_namespaces_claim_no_name_twice() -> None:
    def claimed(namespace: str, values: Manifest) -> set[Any]:
        manifests = render(values, release="hpu-operator", namespace=namespace)
        return {(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in manifests}

    first = claimed("one", {"watchNamespaces": ["one"]})
    second = claimed("two", {"watchNamespaces": ["two"], "crds": {"install": False}})
    assert not first & second


def test_the_operator_knows_every_argument_and_variable_it_is_given() -> None:
    run = get_command(app).commands["run"]  # type: ignore[attr-defined]
    known = {name: parameter for parameter in run.params for name in parameter.opts}
    variables = {parameter.envvar for parameter in run.params}
    for values in MATRIX:
        (container,) = only(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
        assert container["args"][0] == "run"
        with run.make_context("run", container["args"][1:]) as context:
            assert list(context.params["namespace"] or ()) == values.get("watchNamespaces", [])
        assert {item["name"] for item in container["env"]} <= variables
        assert container["ports"][0]["containerPort"] == known["--listen-port"].default

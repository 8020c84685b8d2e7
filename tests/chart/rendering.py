"""Runs Helm on the chart without a cluster: values in, manifests or Helm's own words out."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import build, modules

CHART = Path(__file__).parents[2] / "charts" / "hpu-operator"
GENERATED_CRD = Path(__file__).parents[2] / "crds" / "serving.hpu.dev_hpuinferences.yaml"
KUBE = modules.KUBERNETES_VERSION
CLUSTER_SCOPED = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}

Manifest = dict[str, Any]


class HelmRefused(Exception):
    """Helm ended with an error; the text is what it wrote."""


@functools.cache
def helm_binary() -> str:
    return str(build.build(modules.helm, modules.HELM) / "helm")


def helm(*arguments: str, stdin: str | None = None, timeout_seconds: float = 120) -> str:
    """The standard output of `helm ARGUMENTS`. Raises HelmRefused with its standard error."""
    done = subprocess.run(
        [helm_binary(), *arguments], input=stdin, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    if done.returncode:
        raise HelmRefused(done.stderr + done.stdout)
    return done.stdout


def render(
    values: Manifest | None = None,
    *,
    release: str = "hpu-operator",
    namespace: str = "hpu-system",
    kube: str = KUBE,
) -> list[Manifest]:
    """The manifests that `helm install` would send, in Helm's order."""
    text = _render(json.dumps(values or {}), release, namespace, kube)
    return [document for document in yaml.safe_load_all(text) if document]


@functools.cache
def _render(values: str, release: str, namespace: str, kube: str) -> str:
    """Helm takes a second under load, and the tests look at the same renderings from several sides."""
    return helm(
        "template", release, str(CHART), "--namespace", namespace, "--kube-version", kube, "--values", "-", stdin=values
    )  # fmt: skip


def only(manifests: list[Manifest], kind: str, suffix: str = "") -> Manifest:
    """The one manifest of a kind (whose name ends with `suffix`)."""
    found = [item for item in manifests if item["kind"] == kind and item["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, [item["metadata"]["name"] for item in found]
    return found[0]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [item for item in manifests if item["kind"] in kinds]

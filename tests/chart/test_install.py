"""The chart in a real API server: what it may do there, how its API is upgraded, what stays when it goes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.rendering import CHART, Manifest
from tests.cluster import launcher, state
from tests.cluster.api import Api, wait_for
from tests.demo.installation import NAMESPACE, RELEASE, clear_interrupted
from tests.demo.kube import CommandFailed, Kube

ROOT = Path(__file__).parents[2]
CRD = "hpuinferences.serving.hpu.dev"
OPS = "ops"
TEAM = "team-a"
OTHER = "team-b"
OPERATOR = f"system:serviceaccount:{OPS}:hpu-operator"

MODEL: Manifest = {
    "apiVersion": "serving.hpu.dev/v1alpha1",
    "kind": "HpuInference",
    "metadata": {"name": "kept", "namespace": TEAM},
    "spec": {"model": {"uri": "pvc://models/m"}},
}


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    """A control plane of this module's own: the definition that it installs and changes is the whole cluster's."""
    launcher.remove_orphans()
    cluster = launcher.up(launcher.Request(f"chart-{os.getpid()}", nodes=0, owner=state.this_process()))
    try:
        kube = Kube.of(cluster)
        for name in (TEAM, OTHER):
            kube.kubectl("create", "namespace", name)
        restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
        kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPS, "labels": restricted}})
        yield kube
    finally:
        launcher.down(cluster.name)


@pytest.fixture
def installed(kube: Kube) -> Iterator[Kube]:
    """The release "hpu-operator" in namespace "ops", serving every namespace."""
    helm_install(kube)
    yield kube
    uninstall(kube)


def helm_install(kube: Kube, *settings: str, release: str = "hpu-operator", chart: Path = CHART) -> str:
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    notes = kube.helm("upgrade", "--install", release, str(chart), "--namespace", OPS, *arguments)
    models = f"/apis/serving.hpu.dev/v1alpha1/namespaces/{TEAM}/hpuinferences"
    wait_for("the API of the definition", lambda: Api(kube.kubeconfig).exists(models), timeout_seconds=60)
    return notes


def uninstall(kube: Kube, release: str = "hpu-operator") -> None:
    kube.helm("uninstall", release, "--namespace", OPS, "--ignore-not-found")


def can(kube: Kube, who: str, verb: str, resource: str, namespace: str = TEAM, name: str = "") -> bool:
    """The API server's own opinion. `resource` is "plural[.group][/subresource]"."""
    whole, _, subresource = resource.partition("/")
    plural, _, group = whole.partition(".")
    asked = {"verb": verb, "group": group, "resource": plural, "subresource": subresource, "namespace": namespace}
    review: Manifest = {
        "spec": {
            "user": who,
            "groups": ["system:authenticated"],
            "resourceAttributes": {**asked, "name": name},
        }
    }
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    answer: Manifest = Api(kube.kubeconfig).request("POST", path, review)
    return bool(answer["status"]["allowed"])


def wait_until_allowed(kube: Kube, who: str, *wanted: tuple[str, ...]) -> None:
    """The API server reads roles and bindings behind their writing, each on its own."""
    for what in wanted:
        wait_for(f"{who} may {' '.join(what)}", lambda what=what: can(kube, who, *what), timeout_seconds=60)  # type: ignore[misc]


def live_crd(kube: Kube) -> Manifest:
    found = kube.get("crd", CRD)
    assert found is not None
    return found


def test_a_namespace_that_admits_restricted_pods_only_admits_the_operator(installed: Kube) -> None:
    def pods() -> list[Manifest]:
        return installed.list("pods", namespace=OPS, selector="app.kubernetes.io/name=hpu-operator")

    wait_for("the operator's pod", lambda: bool(pods()), timeout_seconds=60)
    assert pods()[0]["status"]["phase"] == "Pending", "admitted; there is no node to run it"


def test_the_notes_say_what_comes_next(kube: Kube) -> None:
    notes = helm_install(kube, f"watchNamespaces={{{TEAM}}}")
    try:
        assert "rollout status deployment/hpu-operator" in notes
        assert f"kubectl -n {TEAM} get hpui" in notes
        example = notes[notes.index("<<'YAML'") + len("<<'YAML'") : notes.rindex("YAML\n")]
        kube.kubectl("apply", "--dry-run=server", "-n", TEAM, "-f", "-", stdin=example)
    finally:
        uninstall(kube)


def test_every_example_and_every_object_in_the_documents_is_admitted(installed: Kube) -> None:
    texts = {str(path): path.read_text() for path in (ROOT / "examples").glob("*.yaml")}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for number, block in enumerate(
            re.findall(r"```yaml\n(apiVersion: serving.*?)```", page.read_text(), re.DOTALL)
        ):
            texts[f"{page} {number}"] = block
    assert len(texts) > len(list((ROOT / "examples").glob("*.yaml"))), "the documents have objects"
    for text in texts.values():
        moved = text.replace("namespace: default", f"namespace: {TEAM}")
        installed.kubectl("apply", "--dry-run=server", "-n", TEAM, "-f", "-", stdin=moved)


WANTED = [
    ("watch", "hpuinferences.serving.hpu.dev"),
    ("patch", "hpuinferences.serving.hpu.dev/status"),
    ("create", "statefulsets.apps"),
    ("delete", "statefulsets.apps"),
    ("create", "controllerrevisions.apps"),
    ("create", "services"),
    ("patch", "pods"),
    ("list", "events"),
    ("list", "endpointslices.discovery.k8s.io"),
    ("update", "hpuinferences.serving.hpu.dev/finalizers"),
]
FORBIDDEN = [
    ("get", "secrets"),
    ("list", "secrets"),
    ("get", "pods/log"),
    ("create", "pods/exec"),
    ("update", "hpuinferences.serving.hpu.dev"),
    ("delete", "hpuinferences.serving.hpu.dev"),
    ("create", "deployments.apps"),
    ("create", "rolebindings.rbac.authorization.k8s.io"),
    ("delete", "pods"),
    ("delete", "services"),
    ("get", "configmaps"),
    ("delete", "persistentvolumeclaims"),
]


def test_the_operator_may_do_its_work_everywhere_and_nothing_else(installed: Kube) -> None:
    lease = ("update", "leases.coordination.k8s.io", OPS)
    wait_until_allowed(installed, OPERATOR, *WANTED, ("list", "pods", OTHER), (*lease, "hpu-operator"))
    assert [what for what in FORBIDDEN if can(installed, OPERATOR, *what)] == []
    assert not can(installed, OPERATOR, *lease, "another")
    assert not can(installed, OPERATOR, "get", "leases.coordination.k8s.io", TEAM)


def test_with_watch_namespaces_it_may_do_nothing_elsewhere(kube: Kube) -> None:
    helm_install(kube, f"watchNamespaces={{{TEAM}}}")
    try:
        wait_until_allowed(kube, OPERATOR, *WANTED)
        # What a release before this one was allowed may linger as long.
        wait_for(
            f"{OPERATOR} may do nothing in {OTHER}",
            lambda: not [what for what in WANTED if can(kube, OPERATOR, *what, OTHER)],
            timeout_seconds=60,
        )
        assert not can(kube, OPERATOR, "list", "nodes")
    finally:
        uninstall(kube)


def test_an_upgrade_brings_the_changed_definition_and_objects_stay(installed: Kube, tmp_path: Path) -> None:
    installed.apply(MODEL)
    uid = _uid(installed)
    newer = tmp_path / "hpu-operator"
    shutil.copytree(CHART, newer)
    definition = newer / "files" / "hpuinferences.yaml"
    crd: dict[str, Any] = yaml.safe_load(definition.read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["addedLater"] = {"type": "string", "maxLength": 10, "default": "here"}
    definition.write_text(yaml.safe_dump(crd))
    helm_install(installed, chart=newer)
    live = live_crd(installed)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert live["properties"]["addedLater"]["default"] == "here"
    wait_for("the new default", lambda: _spec(installed).get("addedLater") == "here", timeout_seconds=60)
    assert _uid(installed) == uid
    # An older chart takes the field away again, as a rollback would.
    helm_install(installed)
    wait_for("the field's removal", lambda: "addedLater" not in _spec(installed), timeout_seconds=60)
    assert _uid(installed) == uid


def test_definition_and_objects_outlive_the_release_and_are_adopted_by_the_next_of_its_name(kube: Kube) -> None:
    helm_install(kube)
    kube.apply(MODEL)
    definition, uid = live_crd(kube)["metadata"]["uid"], _uid(kube)
    uninstall(kube)
    assert kube.get("deployment", "hpu-operator", namespace=OPS) is None
    helm_install(kube)
    assert live_crd(kube)["metadata"]["uid"] == definition
    assert _uid(kube) == uid
    uninstall(kube)


def test_a_release_of_another_name_is_refused_until_it_is_told_to_take_over(kube: Kube) -> None:
    helm_install(kube)
    uninstall(kube)
    with pytest.raises(CommandFailed, match="release-name"):
        helm_install(kube, release="renamed")
    kube.helm("install", "renamed", str(CHART), "--namespace", OPS, "--take-ownership")
    assert live_crd(kube)["metadata"]["annotations"]["meta.helm.sh/release-name"] == "renamed"
    uninstall(kube, "renamed")
    kube.helm("install", "hpu-operator", str(CHART), "--namespace", OPS, "--take-ownership")
    uninstall(kube)


def test_an_installation_that_was_killed_half_way_is_cleared_up_by_the_demo(kube: Kube) -> None:
    """Nothing becomes ready without a node, so Helm waits until it is killed, and leaves its release pending."""
    command = [
        str(kube.helm_binaries / "helm"),
        "install",
        RELEASE,
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--take-ownership",
        "--wait",
    ]
    kube.kubectl("create", "namespace", NAMESPACE)
    with subprocess.Popen(command, env=kube.environment(), stdout=subprocess.DEVNULL) as process:
        wait_for(
            "the Deployment",
            lambda: kube.get("deployment", RELEASE, namespace=NAMESPACE) is not None,
            timeout_seconds=60,
        )
        process.kill()
    again = ("upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--take-ownership")
    with pytest.raises(CommandFailed, match="another operation"):
        kube.helm(*again)
    clear_interrupted(kube)
    kube.helm(*again)
    kube.helm("uninstall", RELEASE, "--namespace", NAMESPACE)
    # The definition stays, marked as that release's; the other tests' release would be refused.
    kube.kubectl("delete", "crd", CRD)


def test_switching_the_definition_off_leaves_it_where_it_is(installed: Kube) -> None:
    before = live_crd(installed)["metadata"]["uid"]
    helm_install(installed, "crds.install=false")
    assert live_crd(installed)["metadata"]["uid"] == before
    assert "deletionTimestamp" not in live_crd(installed)["metadata"]


def test_who_may_edit_a_namespace_may_edit_its_models_but_not_write_their_status(installed: Kube) -> None:
    installed.kubectl("create", "rolebinding", "dev", "--clusterrole=edit", "--user=dev", "-n", TEAM)
    installed.kubectl("create", "rolebinding", "guest", "--clusterrole=view", "--user=guest", "-n", TEAM)
    wait_until_allowed(installed, "dev", ("create", CRD), ("patch", f"{CRD}/scale"))
    wait_until_allowed(installed, "guest", ("list", CRD))
    assert not can(installed, "dev", "patch", f"{CRD}/status")
    assert not can(installed, "dev", "create", CRD, OTHER)
    assert not can(installed, "guest", "create", CRD)


def _object(kube: Kube) -> Manifest:
    found = kube.get("hpui", MODEL["metadata"]["name"], namespace=TEAM)
    assert found is not None
    return found


def _uid(kube: Kube) -> str:
    return str(_object(kube)["metadata"]["uid"])


def _spec(kube: Kube) -> Manifest:
    spec: Manifest = _object(kube)["spec"]
    return spec

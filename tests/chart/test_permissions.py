"""The operator may do what it does, and nothing more."""

from __future__ import annotations

import pytest

from hpu_operator.kube.permissions import IN_LEASE_NAMESPACE, IN_SERVED_NAMESPACES, Permission
from tests.chart.rendering import CLUSTER_SCOPED, Manifest, of_kind, only, render

Right = tuple[str, str, str]

NEVER = {
    "secrets",
    "pods/log",
    "pods/exec",
    "pods/attach",
    "pods/portforward",
    "serviceaccounts",
    "customresourcedefinitions",
}


def rights(role: Manifest) -> set[Right]:
    """(group, resource, verb) of every rule."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def operator_roles(manifests: list[Manifest]) -> list[Manifest]:
    """The roles that are bound to the operator's service account."""
    bound = {binding["roleRef"]["name"] for binding in of_kind(manifests, "RoleBinding", "ClusterRoleBinding")}
    return [role for role in of_kind(manifests, "Role", "ClusterRole") if role["metadata"]["name"] in bound]


def needed(permissions: tuple[Permission, ...]) -> set[Right]:
    return {(item.group, item.resource, verb) for item in permissions for verb in item.verbs}


@pytest.mark.parametrize("namespaces", [[], ["team-a", "team-b"]], ids=["cluster-wide", "namespaced"])
def test_the_operator_gets_what_it_needs_and_not_one_right_more(namespaces: list[str]) -> None:
    roles = operator_roles(render({"watchNamespaces": namespaces}))
    lease = only(roles, "Role", "-lease")
    assert rights(lease) == needed(IN_LEASE_NAMESPACE)
    serving = [role for role in roles if role is not lease]
    assert [role["metadata"].get("namespace", "") for role in serving] == (namespaces or [""])
    for role in serving:
        assert rights(role) == needed(IN_SERVED_NAMESPACES)


def test_no_right_gives_others_or_reads_what_is_secret() -> None:
    for role in operator_roles(render()):
        for group, resource, verb in rights(role):
            assert "*" not in {group, resource, verb}
            assert resource not in NEVER
            assert verb not in {"escalate", "bind", "impersonate", "deletecollection"}
            assert (resource, verb) != ("hpuinferences", "patch"), "the spec is the user's"


def test_namespaced_mode_makes_nothing_for_the_whole_cluster() -> None:
    assert not of_kind(render({"watchNamespaces": ["team-a"], "crds": {"install": False}}), *CLUSTER_SCOPED)


def test_bindings_point_at_the_service_account_of_the_release() -> None:
    for values in ({}, {"watchNamespaces": ["team-a"]}, {"serviceAccount": {"create": False, "name": "mine"}}):
        manifests = render(values, release="r", namespace="ops")
        account = only(manifests, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
        for binding in of_kind(manifests, "RoleBinding", "ClusterRoleBinding"):
            assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "ops"}]
        accounts = of_kind(manifests, "ServiceAccount")
        assert [item["metadata"]["name"] for item in accounts] == ([] if account == "mine" else [account])


def test_only_its_own_lease_may_be_changed() -> None:
    manifests = render(release="r", namespace="ops")
    role = only(manifests, "Role", "-lease")
    assert role["metadata"]["namespace"] == "ops"
    changing = [rule for rule in role["rules"] if rule["verbs"] != ["create"]]
    (container,) = only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert [rule["resourceNames"] for rule in changing] == [["r-hpu-operator"]]
    assert "--lease-name=r-hpu-operator" in container["args"]


def test_without_rbac_nothing_is_granted() -> None:
    manifests = render({"rbac": {"create": False, "userRoles": False}})
    assert not of_kind(manifests, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")


def test_users_who_may_edit_a_namespace_may_edit_its_objects_but_not_their_status() -> None:
    edit, view = (only(render(), "ClusterRole", suffix) for suffix in ("hpuinferences-edit", "hpuinferences-view"))
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert not {right for right in rights(edit) if right[1].endswith("/status")}
    assert {verb for _, _, verb in rights(view)} == {"get", "list", "watch"}

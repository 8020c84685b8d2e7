"""The least the operator may do, by resource. The chart's roles and the tests' are compared with this list.

No Secrets, no `pods/log`, no wildcards, no nodes. An apply that may create needs `create` beside `patch`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpu_operator.api.schema import GROUP, PLURAL


@dataclass(frozen=True)
class Permission:
    group: str
    resource: str
    verbs: tuple[str, ...]
    why: str


IN_SERVED_NAMESPACES = (
    Permission(GROUP, PLURAL, ("list", "watch"), "read what users declare"),
    Permission(GROUP, f"{PLURAL}/status", ("patch",), "say what is so"),
    Permission(GROUP, f"{PLURAL}/finalizers", ("update",), "owner references, where the cluster protects them"),
    Permission("apps", "statefulsets", ("get", "list", "watch", "create", "patch", "delete"), "groups"),
    Permission("apps", "controllerrevisions", ("get", "list", "watch", "create", "patch", "delete"), "records"),
    Permission("", "services", ("get", "list", "watch", "create", "patch"), "the API and names for rendezvous"),
    Permission("", "pods", ("list", "watch", "patch"), "read states, set the service label"),
    Permission("", "events", ("list", "create"), "why a pod waits; tell people"),
    Permission("discovery.k8s.io", "endpointslices", ("list",), "whether a group's endpoints are gone"),
)
"""A ClusterRole, or a Role in every served namespace."""

IN_LEASE_NAMESPACE = (Permission("coordination.k8s.io", "leases", ("get", "create", "update"), "leadership"),)
"""A Role in the operator's own namespace. Only `create` cannot be limited to the Lease's name."""

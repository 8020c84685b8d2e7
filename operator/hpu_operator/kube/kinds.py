"""The kinds the operator reads or writes, and their paths."""

from __future__ import annotations

from dataclasses import dataclass

from hpu_operator.api import schema
from hpu_operator.domain import names


@dataclass(frozen=True)
class Kind:
    """One resource of the API server. `selector` limits what is listed and watched."""

    group: str
    version: str
    plural: str
    kind: str
    selector: str = ""

    @property
    def type_meta(self) -> dict[str, str]:
        version = f"{self.group}/{self.version}" if self.group else self.version
        return {"apiVersion": version, "kind": self.kind}

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        return "/".join(parts + [part for part in (name, subresource) if part])


INFERENCE = Kind(schema.GROUP, schema.VERSION, schema.PLURAL, schema.KIND)
STATEFUL_SET = Kind("apps", "v1", "statefulsets", "StatefulSet", names.CHILD_SELECTOR)
RECORD = Kind("apps", "v1", "controllerrevisions", "ControllerRevision", names.RECORD_SELECTOR)
SERVICE = Kind("", "v1", "services", "Service", names.CHILD_SELECTOR)
POD = Kind("", "v1", "pods", "Pod", names.CHILD_SELECTOR)
EVENT = Kind("", "v1", "events", "Event")
ENDPOINT_SLICE = Kind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")

WATCHED = (INFERENCE, STATEFUL_SET, RECORD, SERVICE, POD)
"""Kept in the cache: listed before the first reconcile, then watched."""

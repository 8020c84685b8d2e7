"""Manifests: what should exist in the cluster for one object. Each function returns what is applied, and no more.

Amounts are written in the API server's canonical form and zero values are left out, so that a live object can be
compared field by field.
"""

from __future__ import annotations

from typing import Any

from hpu_engine.contract import API_PORT, CONTROL_PORT, LIVENESS_PATH, READINESS_PATH
from hpu_operator.api.inference import Spec
from hpu_operator.domain import names
from hpu_operator.domain.compare import Manifest, with_hash
from hpu_operator.domain.engine_arguments import (
    MODEL_MOUNT,
    TERMINATION_LOG,
    engine_arguments,
    model_place,
    termination_grace_seconds,
)
from hpu_operator.domain.names import GroupId
from hpu_operator.domain.owner import Owner, child_metadata
from hpu_operator.domain.revision import Record, canonical_resources, canonical_sizes

CONTAINER = "engine"
_SCRATCH = "/tmp"  # noqa: S108 - the one writable folder of a read-only file system
_MODEL_VOLUME = "hpu-model"
_SCRATCH_VOLUME = "hpu-scratch"


def pods_per_group(spec: Spec) -> int:
    cards = spec.parallelism.tensor * spec.parallelism.data
    return cards // (spec.parallelism.cards_per_pod or min(8, cards))


def render_record(owner: Owner, spec: Spec, revision: str, number: int, default_image: str) -> Record:
    """What this revision runs, with today's default image. Raises `quantity.NotAQuantity`."""
    return Record(revision, number, pods_per_group(spec), _pod_template(owner, spec, revision, default_image))


def _pod_template(owner: Owner, spec: Spec, revision: str, default_image: str) -> Manifest:
    pod = spec.pod
    labels = {
        **(pod.labels or {}),
        **names.object_labels(owner.name),
        names.COMPONENT_LABEL: names.ENGINE_COMPONENT,
        names.REVISION_LABEL: revision,
        names.IN_SERVICE_LABEL: "true",
    }
    metadata: Manifest = {"labels": labels}
    if pod.annotations:
        metadata["annotations"] = dict(pod.annotations)
    return {"metadata": metadata, "spec": _pod_spec(owner.name, spec, default_image)}


def _pod_spec(name: str, spec: Spec, default_image: str) -> Manifest:
    pod = spec.pod
    claim = model_place(spec.model.uri).claim
    volumes: list[Manifest] = [{"name": _SCRATCH_VOLUME, "emptyDir": {}}]
    if claim:
        volumes.append({"name": _MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    passed_on = {
        "nodeSelector": _plain(pod.node_selector),
        "tolerations": _plain(pod.tolerations),
        "affinity": _plain(pod.affinity),
        "priorityClassName": pod.priority_class_name,
        "runtimeClassName": pod.runtime_class_name,
        "imagePullSecrets": _plain(pod.image_pull_secrets),
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": termination_grace_seconds(spec),
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(name, spec, default_image)],
        "volumes": volumes + [canonical_sizes(volume) for volume in _plain(pod.volumes) or []],
        **{key: value for key, value in passed_on.items() if value},
    }


def _container(name: str, spec: Spec, default_image: str) -> Manifest:
    pod = spec.pod
    container: Manifest = {
        "name": CONTAINER,
        "image": pod.image or default_image,
        "imagePullPolicy": pod.image_pull_policy,
        "command": ["hpu-engine"],
        "args": engine_arguments(name, spec),
        "ports": [{"name": "http", "containerPort": API_PORT}, {"name": "control", "containerPort": CONTROL_PORT}],
        "env": _variables(spec),
        # /livez fails when a step loop or the start-up stops moving, so it is right from the first second and needs no
        # start-up probe with a guess of how long a model takes.
        "livenessProbe": _probe(LIVENESS_PATH, every=10, failures=6),
        "readinessProbe": _probe(READINESS_PATH, every=2, failures=2),
        "terminationMessagePath": TERMINATION_LOG,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _mounts(spec),
    }
    if pod.resources and (resources := canonical_resources(_plain(pod.resources))):
        container["resources"] = resources
    return container


def _variables(spec: Spec) -> list[Manifest]:
    """Ours, then the user's; a variable that the user sets as well is the user's."""
    theirs = [canonical_sizes(variable) for variable in _plain(spec.pod.env) or []]
    named = {variable["name"] for variable in theirs}
    return [variable for variable in [{"name": "HOME", "value": _SCRATCH}] if variable["name"] not in named] + theirs


def _mounts(spec: Spec) -> list[Manifest]:
    own: list[Manifest] = [{"name": _SCRATCH_VOLUME, "mountPath": _SCRATCH}]
    if model_place(spec.model.uri).claim:
        own.append({"name": _MODEL_VOLUME, "mountPath": MODEL_MOUNT, "readOnly": True})
    return own + (_plain(spec.pod.volume_mounts) or [])


def _probe(path: str, *, every: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": CONTROL_PORT},
        "periodSeconds": every,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _plain(value: Any) -> Any:
    """A part of the spec as JSON, without what the user left out."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return dict(value)
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)


def stateful_set(owner: Owner, group: GroupId, record: Record) -> Manifest:
    """One group, made from its revision's record and from nothing else."""
    selector = names.group_labels(owner.name, group)
    template = record.template
    metadata = {**template["metadata"], "labels": {**template["metadata"]["labels"], **selector}}
    labels = {**names.object_labels(owner.name), names.COMPONENT_LABEL: names.ENGINE_COMPONENT, **selector}
    return with_hash(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": child_metadata(owner, names.stateful_set(owner.name, group), labels),
            "spec": {
                "replicas": record.pods_per_group,
                "serviceName": names.ranks_service(owner.name),
                "podManagementPolicy": "Parallel",
                "updateStrategy": {"type": "OnDelete"},
                "revisionHistoryLimit": 1,
                "selector": {"matchLabels": selector},
                "template": {"metadata": metadata, "spec": template["spec"]},
            },
        }
    )


def service(owner: Owner) -> Manifest:
    """Where clients find the API: pods that are ready and in service."""
    spec = {"type": "ClusterIP", "selector": {names.NAME_LABEL: owner.name, names.IN_SERVICE_LABEL: "true"}}
    return _service(owner, names.service(owner.name), spec, "http", API_PORT)


def ranks_service(owner: Owner) -> Manifest:
    """Names of pods for rendezvous, before they are ready. Readiness is never read from it."""
    selector = {names.NAME_LABEL: owner.name}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return _service(owner, names.ranks_service(owner.name), spec, "control", CONTROL_PORT)


def _service(owner: Owner, name: str, spec: Manifest, port_name: str, port: int) -> Manifest:
    labels = {**names.object_labels(owner.name), names.COMPONENT_LABEL: names.SERVICE_COMPONENT}
    ports = [{"name": port_name, "port": port, "targetPort": port, "protocol": "TCP"}]
    metadata = child_metadata(owner, name, labels)
    return with_hash({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {**spec, "ports": ports}})


def service_label(namespace: str, pod_name: str, pod_uid: str, left_at: str | None) -> Manifest:
    """The pod's service label: false since `left_at`, or true again. The uid makes it an update of that very pod."""
    metadata: Manifest = {"name": pod_name, "namespace": namespace, "uid": pod_uid}
    metadata["labels"] = {names.IN_SERVICE_LABEL: "false" if left_at else "true"}
    if left_at:
        metadata["annotations"] = {names.LEFT_SERVICE_ANNOTATION: left_at}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}

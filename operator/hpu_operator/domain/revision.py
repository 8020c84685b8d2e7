"""The revision of a spec, and the record of what it was rendered to.

A revision is a hash of everything that changes what a pod runs: never `replicas`, never the operator's version or its
default image. Values equal to a default do not count, so an operator that knows more fields finds the same revisions;
quantities count by amount, not by spelling.

The record is a ControllerRevision that holds the rendered pod template. It is written once and groups are made and
repaired from it, so a newer operator changes a running pod only when a user asks for a new revision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpu_operator.api.inference import Spec
from hpu_operator.api.schema import what_pods_run
from hpu_operator.domain import names, quantity
from hpu_operator.domain.compare import Manifest, digest
from hpu_operator.domain.facts import Facts, last_good, read_facts
from hpu_operator.domain.owner import Owner, child_metadata

_LENGTH = 8
_SIZES = ("sizeLimit", "divisor")
MAX_RECORDS = 10
"""Records kept of revisions that no group runs."""


@dataclass(frozen=True)
class Record:
    """What one revision runs. `template` is a pod template without the labels of a single group."""

    revision: str
    number: int
    pods_per_group: int
    template: Manifest
    facts: Facts = field(default_factory=Facts)

    @property
    def image(self) -> str:
        return str(self.template["spec"]["containers"][0]["image"])


def revision_of(spec: Spec) -> str:
    """Eight hexadecimal digits. Raises `quantity.NotAQuantity` for a resource amount that is not one."""
    content = what_pods_run(spec).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return digest(_canonical_quantities(content))[:_LENGTH]


def _canonical_quantities(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {
            key: canonical_resources(value) if key == "resources" else _canonical_quantities(value)
            for key, value in canonical_sizes(content).items()
        }
    if isinstance(content, list):
        return [_canonical_quantities(item) for item in content]
    return content


def canonical_sizes(content: Mapping[str, Any]) -> Manifest:
    """A volume or variable with the amounts it may contain in canonical form. Raises `quantity.NotAQuantity`."""
    return {
        key: quantity.canonical(value)
        if key in _SIZES and isinstance(value, str)
        else canonical_sizes(value)
        if isinstance(value, Mapping) and key != "resources"
        else value
        for key, value in content.items()
    }


def canonical_resources(resources: Mapping[str, Mapping[str, str]]) -> Manifest:
    """Requests and limits with every amount in canonical form. Raises `quantity.NotAQuantity`."""
    return {
        kind: {name: quantity.canonical(amount, quantity.MILLI) for name, amount in amounts.items()}
        for kind, amounts in resources.items()
    }


def record_manifest(owner: Owner, record: Record) -> Manifest:
    """The ControllerRevision. Its `data` can never be changed once it exists."""
    labels = {
        **names.object_labels(owner.name),
        names.COMPONENT_LABEL: names.RECORD_COMPONENT,
        names.REVISION_LABEL: record.revision,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": child_metadata(owner, names.revision_record(owner.name, record.revision), labels),
        "revision": record.number,
        "data": {"podsPerGroup": record.pods_per_group, "template": record.template},
    }


def read_record(live: Mapping[str, Any]) -> Record | None:
    """The record in a ControllerRevision; None where it is not one of ours or incomplete."""
    revision = live.get("metadata", {}).get("labels", {}).get(names.REVISION_LABEL)
    data = live.get("data") or {}
    template = data.get("template") or {}
    if not revision or not template.get("spec", {}).get("containers"):
        return None
    number, pods_per_group = int(live.get("revision", 0)), int(data.get("podsPerGroup", 1))
    return Record(revision, number, pods_per_group, template, read_facts(live))


def record_from_stateful_set(live: Mapping[str, Any], number: int) -> Record | None:
    """The record that a running group was made from, for a record that was deleted.

    A fresh rendering could have another default image; what runs counts.
    """
    spec = live.get("spec", {})
    template = spec.get("template", {})
    metadata = template.get("metadata", {})
    group = names.group_of(metadata.get("labels", {}))
    if group is None:
        return None
    of_one_group = {names.GROUP_LABEL, names.ATTEMPT_LABEL}
    labels = {key: value for key, value in metadata.get("labels", {}).items() if key not in of_one_group}
    kept = {"labels": labels} | ({"annotations": metadata["annotations"]} if metadata.get("annotations") else {})
    return Record(group.revision, number, int(spec.get("replicas", 1)), {"metadata": kept, "spec": template["spec"]})


def next_number(records: Iterable[Record]) -> int:
    return max((record.number for record in records), default=0) + 1


def expired(records: Iterable[Record], in_use: Iterable[str]) -> tuple[Record, ...]:
    """Records to delete, oldest first: of those not in use, all but the newest `MAX_RECORDS`.

    The last good revision counts as in use: groups may have to go back to it.
    """
    known = {record.revision: record for record in records}
    needed = {*in_use, last_good({revision: record.facts for revision, record in known.items()})}
    idle = sorted((known[revision] for revision in known.keys() - needed), key=lambda record: record.number)
    return tuple(idle[:-MAX_RECORDS])

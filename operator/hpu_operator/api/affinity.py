"""Node and pod affinity as core/v1 has them, with bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpu_operator.api.schema import ApiModel, LabelValue, Name

Key = Annotated[str, Field(min_length=1, max_length=316)]
Weight = Annotated[int, Field(ge=1, le=100)]


class NodeRequirement(ApiModel):
    key: Key = Field(description="Label of the node.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = Field(
        description="How key and values relate."
    )
    values: tuple[LabelValue, ...] | None = Field(
        default=None, max_length=64, description="Values to compare with; none for Exists and DoesNotExist."
    )


class NodeSelectorTerm(ApiModel):
    match_expressions: tuple[NodeRequirement, ...] | None = Field(
        default=None, max_length=16, description="Requirements on labels; all must hold."
    )
    match_fields: tuple[NodeRequirement, ...] | None = Field(
        default=None, max_length=16, description="Requirements on fields, such as metadata.name; all must hold."
    )


class NodeSelector(ApiModel):
    node_selector_terms: tuple[NodeSelectorTerm, ...] = Field(
        max_length=16, description="Terms of which one must hold."
    )


class PreferredNodes(ApiModel):
    weight: Weight = Field(description="How much it counts, 1 to 100.")
    preference: NodeSelectorTerm = Field(description="The nodes that are preferred.")


class NodeAffinity(ApiModel):
    required_during_scheduling_ignored_during_execution: NodeSelector | None = Field(
        default=None, description="Nodes a pod may run on."
    )
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNodes, ...] | None = Field(
        default=None, max_length=16, description="Nodes a pod should rather run on."
    )


class LabelRequirement(ApiModel):
    key: Key = Field(description="Label of the pod.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(description="How key and values relate.")
    values: tuple[LabelValue, ...] | None = Field(
        default=None, max_length=64, description="Values to compare with; none for Exists and DoesNotExist."
    )


class LabelSelector(ApiModel):
    match_labels: dict[str, LabelValue] | None = Field(
        default=None, max_length=32, description="Labels and their values; all must match."
    )
    match_expressions: tuple[LabelRequirement, ...] | None = Field(
        default=None, max_length=16, description="Requirements on labels; all must hold."
    )


class PodTerm(ApiModel):
    label_selector: LabelSelector | None = Field(default=None, description="Which pods.")
    topology_key: Key = Field(description="Node label that says what is near, such as kubernetes.io/hostname.")
    namespaces: tuple[Name, ...] | None = Field(
        default=None, max_length=16, description="Namespaces of those pods. Absent: this one."
    )
    namespace_selector: LabelSelector | None = Field(default=None, description="Namespaces of those pods, by label.")
    match_label_keys: tuple[Key, ...] | None = Field(
        default=None, max_length=16, description="Labels in which those pods equal this one."
    )
    mismatch_label_keys: tuple[Key, ...] | None = Field(
        default=None, max_length=16, description="Labels in which those pods differ from this one."
    )


class PreferredPods(ApiModel):
    weight: Weight = Field(description="How much it counts, 1 to 100.")
    pod_affinity_term: PodTerm = Field(description="The pods that are preferred.")


class PodAffinity(ApiModel):
    required_during_scheduling_ignored_during_execution: tuple[PodTerm, ...] | None = Field(
        default=None, max_length=16, description="Terms that must hold."
    )
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPods, ...] | None = Field(
        default=None, max_length=16, description="Terms that should rather hold."
    )


class Affinity(ApiModel):
    node_affinity: NodeAffinity | None = Field(default=None, description="Rules about nodes.")
    pod_affinity: PodAffinity | None = Field(default=None, description="Pods to be near.")
    pod_anti_affinity: PodAffinity | None = Field(default=None, description="Pods to be away from.")

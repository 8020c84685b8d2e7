"""Node and pod affinity as core/v1 has them, with bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpu_operator.api.schema import ApiModel, LabelValue, Name

Key = Annotated[str, Field(min_length=1, max_length=316)]
Weight = Annotated[int, Field(ge=1, le=100)]


class NodeRequirement(ApiModel):
    key: Key
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: tuple[LabelValue, ...] | None = Field(default=None, max_length=64)


class NodeSelectorTerm(ApiModel):
    match_expressions: tuple[NodeRequirement, ...] | None = Field(default=None, max_length=16)
    match_fields: tuple[NodeRequirement, ...] | None = Field(default=None, max_length=16)


class NodeSelector(ApiModel):
    node_selector_terms: tuple[NodeSelectorTerm, ...] = Field(max_length=16)


class PreferredNodes(ApiModel):
    weight: Weight
    preference: NodeSelectorTerm


class NodeAffinity(ApiModel):
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNodes, ...] | None = Field(
        default=None, max_length=16
    )


class LabelRequirement(ApiModel):
    key: Key
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[LabelValue, ...] | None = Field(default=None, max_length=64)


class LabelSelector(ApiModel):
    match_labels: dict[str, LabelValue] | None = Field(default=None, max_length=32)
    match_expressions: tuple[LabelRequirement, ...] | None = Field(default=None, max_length=16)


class PodTerm(ApiModel):
    label_selector: LabelSelector | None = None
    topology_key: Key
    namespaces: tuple[Name, ...] | None = Field(default=None, max_length=16)
    namespace_selector: LabelSelector | None = None
    match_label_keys: tuple[Key, ...] | None = Field(default=None, max_length=16)
    mismatch_label_keys: tuple[Key, ...] | None = Field(default=None, max_length=16)


class PreferredPods(ApiModel):
    weight: Weight
    pod_affinity_term: PodTerm


class PodAffinity(ApiModel):
    required_during_scheduling_ignored_during_execution: tuple[PodTerm, ...] | None = Field(default=None, max_length=16)
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPods, ...] | None = Field(
        default=None, max_length=16
    )


class Affinity(ApiModel):
    node_affinity: NodeAffinity | None = Field(default=None, description="Rules about nodes.")
    pod_affinity: PodAffinity | None = Field(default=None, description="Pods to be near.")
    pod_anti_affinity: PodAffinity | None = Field(default=None, description="Pods to be away from.")

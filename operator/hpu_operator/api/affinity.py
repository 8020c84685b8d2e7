"""Node and pod affinity as core/v1 has them, with bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from hpu_operator.api.formats import KEYS_OF_LABELS, LabelKey, LabelValue, NamespaceName
from hpu_operator.api.schema import ApiModel, rule, rules

Weight = Annotated[int, Field(ge=1, le=100)]

_HAS_VALUES = "has(self.values) && self.values.size() > 0"
_LISTED = rule(
    f"!(self.operator in ['In', 'NotIn']) || ({_HAS_VALUES})",
    "In and NotIn need values: add at least one",
)
_BARE = rule(
    f"!(self.operator in ['Exists', 'DoesNotExist']) || !({_HAS_VALUES})",
    "Exists and DoesNotExist take no values: remove them, or use In or NotIn",
)
_COMPARED = rule(
    "!(self.operator in ['Gt', 'Lt']) || (has(self.values) && self.values.size() == 1 "
    "&& self.values[0].matches('^[0-9]{1,18}$'))",
    "Gt and Lt compare with one whole number: write it as the only value, in quotes",
)
_OF_A_TERM = "matchLabelKeys and mismatchLabelKeys need a labelSelector: add one"


class NodeRequirement(ApiModel):
    model_config = ConfigDict(json_schema_extra=rules(_LISTED, _BARE, _COMPARED))
    key: LabelKey = Field(description="Label of the node.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = Field(
        description="How key and values relate."
    )
    values: tuple[LabelValue, ...] | None = Field(
        default=None, max_length=64, description="Values to compare with; none for Exists and DoesNotExist."
    )


class NodeFieldRequirement(ApiModel):
    key: Literal["metadata.name"] = Field(description="Field of the node: its name is the only one.")
    operator: Literal["In", "NotIn"] = Field(description="Whether it is or is not the value.")
    values: tuple[Annotated[str, Field(min_length=1, max_length=253)], ...] = Field(
        min_length=1, max_length=1, description="The one name to compare with."
    )


class NodeSelectorTerm(ApiModel):
    match_expressions: tuple[NodeRequirement, ...] | None = Field(
        default=None, max_length=16, description="Requirements on labels; all must hold."
    )
    match_fields: tuple[NodeFieldRequirement, ...] | None = Field(
        default=None, max_length=16, description="Requirements on the node's name; all must hold."
    )


class NodeSelector(ApiModel):
    node_selector_terms: tuple[NodeSelectorTerm, ...] = Field(
        min_length=1, max_length=16, description="Terms of which one must hold."
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
    model_config = ConfigDict(json_schema_extra=rules(_LISTED, _BARE))
    key: LabelKey = Field(description="Label of the pod.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(description="How key and values relate.")
    values: tuple[LabelValue, ...] | None = Field(
        default=None, max_length=64, description="Values to compare with; none for Exists and DoesNotExist."
    )


class LabelSelector(ApiModel):
    match_labels: dict[str, LabelValue] | None = Field(
        default=None,
        max_length=32,
        description="Labels and their values; all must match.",
        json_schema_extra=rules(KEYS_OF_LABELS),
    )
    match_expressions: tuple[LabelRequirement, ...] | None = Field(
        default=None, max_length=16, description="Requirements on labels; all must hold."
    )


class PodTerm(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("has(self.labelSelector) || (!has(self.matchLabelKeys) && !has(self.mismatchLabelKeys))", _OF_A_TERM)
        )
    )
    label_selector: LabelSelector | None = Field(default=None, description="Which pods.")
    topology_key: LabelKey = Field(description="Node label that says what is near, such as kubernetes.io/hostname.")
    namespaces: tuple[NamespaceName, ...] | None = Field(
        default=None, max_length=16, description="Namespaces of those pods. Absent: this one."
    )
    namespace_selector: LabelSelector | None = Field(default=None, description="Namespaces of those pods, by label.")
    match_label_keys: tuple[LabelKey, ...] | None = Field(
        default=None, max_length=16, description="Labels in which those pods equal this one."
    )
    mismatch_label_keys: tuple[LabelKey, ...] | None = Field(
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

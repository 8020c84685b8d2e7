"""The plan: everything a deployment costs, as one value: what was settled, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from hpu_engine.planning.model.parameters import active_parameter_count, parameter_count
from hpu_engine.planning.settle import Settled, Specification, settle
from hpu_engine.planning.shapes.warm_up_plan import WarmUpPlan, warm_up_plan
from hpu_engine.planning.traffic import Traffic, step_traffic
from hpu_engine.planning.violations import PlanError


@dataclass(frozen=True, slots=True)
class Plan:
    """One deployment of one group. `warm_up` is None where nothing is padded to buckets."""

    settled: Settled
    parameters: int
    active_parameters: int
    warm_up: WarmUpPlan | None
    traffic: tuple[Traffic, ...]

    @property
    def fits(self) -> bool:
        return self.settled.fits

    @property
    def bytes_per_token(self) -> float:
        """Bytes a card receives per token of the group, over all layers, the sampled row's logits included."""
        return sum(line.bytes_per_token for line in self.traffic)


def make_plan(specification: Specification) -> Plan:
    """Raises PlanError where the specification contradicts itself, and TooFewRecipes; a plan that does not fit is a
    plan.
    """
    settled = settle(specification)
    model, layout, card = specification.model, specification.layout, specification.card
    warm_up = None
    if settled.buckets is not None:
        warm_up = warm_up_plan(model, layout, card, settled.buckets, dtype=settled.compute_dtype)
    return Plan(
        settled=settled,
        parameters=parameter_count(model),
        active_parameters=active_parameter_count(model),
        warm_up=warm_up,
        traffic=step_traffic(model, layout, fp8_dispatch=specification.fp8_dispatch),
    )


def fits(specification: Specification) -> Settled | None:
    """None where the specification does not fit or contradicts itself."""
    try:
        settled = settle(specification)
    except PlanError:
        return None
    return settled if settled.fits else None

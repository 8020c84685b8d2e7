"""Pure arithmetic: what a deployment costs before a card is taken. Standard library and pydantic only."""

from hpu_engine.planning.cards import CARDS, Card
from hpu_engine.planning.layout import Layout
from hpu_engine.planning.model.description import Architecture, ModelDescription
from hpu_engine.planning.model.errors import ModelConfigError, ModelConfigErrorKind
from hpu_engine.planning.model.families import describe, read_model_description
from hpu_engine.planning.plan import Plan, make_plan
from hpu_engine.planning.settle import Settled, Specification, settle
from hpu_engine.planning.violations import PlanError, Violation

__all__ = [
    "CARDS",
    "Architecture",
    "Card",
    "Layout",
    "ModelConfigError",
    "ModelConfigErrorKind",
    "ModelDescription",
    "Plan",
    "PlanError",
    "Settled",
    "Specification",
    "Violation",
    "describe",
    "make_plan",
    "read_model_description",
    "settle",
]

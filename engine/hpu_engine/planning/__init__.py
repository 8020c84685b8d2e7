"""Pure arithmetic: what a deployment costs before a card is taken. Standard library and pydantic only.

The names below are what other programs use. Each loads on first use: who asks for a default does not pay for a plan.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpu_engine.planning.cards import CARDS, Card
    from hpu_engine.planning.layout import Layout
    from hpu_engine.planning.model.description import Architecture, ModelDescription
    from hpu_engine.planning.model.errors import ModelConfigError, ModelConfigErrorKind
    from hpu_engine.planning.model.families import describe, read_model_description
    from hpu_engine.planning.plan import Plan, make_plan
    from hpu_engine.planning.settle import Settled, Specification, settle
    from hpu_engine.planning.violations import PlanError, Violation

_ROOMS = {
    "cards": ("CARDS", "Card"),
    "layout": ("Layout",),
    "model.description": ("Architecture", "ModelDescription"),
    "model.errors": ("ModelConfigError", "ModelConfigErrorKind"),
    "model.families": ("describe", "read_model_description"),
    "plan": ("Plan", "make_plan"),
    "settle": ("Settled", "Specification", "settle"),
    "violations": ("PlanError", "Violation"),
}
_HOMES = {name: f"{__name__}.{room}" for room, names in _ROOMS.items() for name in names}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

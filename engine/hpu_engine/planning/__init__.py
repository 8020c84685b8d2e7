"""Pure arithmetic: what a deployment costs before a card is taken. Standard library and pydantic only."""

from hpu_engine.planning.model.description import (
    Architecture,
    ModelConfigError,
    ModelConfigErrorKind,
    ModelDescription,
    describe,
    read_model_description,
)

__all__ = [
    "Architecture",
    "ModelConfigError",
    "ModelConfigErrorKind",
    "ModelDescription",
    "describe",
    "read_model_description",
]

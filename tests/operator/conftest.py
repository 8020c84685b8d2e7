"""Hypothesis without a time limit per example: the machine is shared, and none of these tests is about speed."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("operator", deadline=None)
settings.load_profile("operator")

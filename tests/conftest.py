"""Fixtures of every room, by plugin, so that no test has to know where one lives.

Hypothesis limits neither the time of an example nor that of its making: the machine is shared, and no property is about
speed.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.side_by_side", "tests.cluster.fixtures", "tests.models.fixtures"]
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

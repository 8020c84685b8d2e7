"""Every reason has a cause, a remedy, a place in documents, and a test that produces it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from hpu_operator.api.reasons import CATALOGUE, Reason, is_failure, severity

TESTS = Path(__file__).parents[1]
OWN = {Path(__file__).name}


@cache
def produced_in_tests() -> set[str]:
    """Reasons that a test function, or a table it is parametrized with, compares an outcome with."""
    found: set[str] = set()
    for path in (*TESTS.glob("operator/test_*.py"), *TESTS.glob("control_plane/test_*.py")):
        if path.name in OWN:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason":
                found.add(Reason[node.attr].value)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in set(Reason):
                found.add(node.value)
    return found


@pytest.mark.parametrize("reason", list(Reason))
def test_a_reason_has_cause_remedy_and_test(reason: Reason) -> None:
    entry = CATALOGUE[reason]
    assert entry.cause.endswith(".")
    assert entry.remedy.endswith(".")
    assert re.match(r"^[A-Z][A-Za-z]+$", reason.value)
    assert reason.value in produced_in_tests(), f"no test produces {reason.value}"


def test_the_catalogue_has_nothing_else() -> None:
    assert list(CATALOGUE) == list(Reason)


def test_failures_are_graver_than_what_is_on_the_way() -> None:
    assert severity(Reason.OUT_OF_MEMORY) < severity(Reason.WARMING_UP) < severity(Reason.ANSWERING)
    assert is_failure(Reason.CONTROL_UNREACHABLE)
    assert not is_failure(Reason.PULLING_IMAGE)
    assert not is_failure(Reason.ANSWERING)

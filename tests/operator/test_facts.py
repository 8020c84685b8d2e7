"""What is known of a revision's past survives in its record's annotations."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_operator.domain.facts import Facts, completed_now, last_good, new_annotations, read_facts
from hpu_operator.domain.names import COMPLETED_ANNOTATION
from tests.operator.objects import NOW

moments = st.integers(0, 10**6).map(lambda seconds: NOW - timedelta(seconds=seconds))
facts = st.builds(Facts, completed=st.none() | moments)


def live(annotations: dict[str, str] | None = None) -> dict[str, Any]:
    return {"metadata": {"name": "smol-r", "annotations": annotations}}


@given(facts, facts)
def test_what_is_written_is_read_and_not_written_again(before: Facts, after: Facts) -> None:
    present = {"theirs": "kept", **new_annotations(before, live())}
    present |= new_annotations(after, live(present))
    assert read_facts(live(present)) == (after if after != Facts() else before), "an unknown fact erases none"
    assert new_annotations(after, live(present)) == {}
    assert present["theirs"] == "kept"


@pytest.mark.parametrize("text", ["yesterday", "", "2026-11-30T12:20:00"])
def test_a_fact_that_was_spoiled_is_unknown(text: str) -> None:
    assert read_facts(live({COMPLETED_ANNOTATION: text})) == Facts()


@given(st.dictionaries(st.sampled_from("abcd"), facts), st.sampled_from("abcd"), moments)
def test_a_revision_that_is_completed_is_the_last_good_one_from_then_on(
    known: dict[str, Facts], revision: str, now: Any
) -> None:
    known = {revision: Facts(), **known}
    after = {**known, revision: completed_now(known, revision, now)}
    assert last_good(after) == revision
    assert completed_now(after, revision, now + timedelta(days=1)) == after[revision], "and it is news once"


def test_without_a_completed_revision_there_is_no_last_good_one() -> None:
    assert last_good({}) is None
    assert last_good({"a": Facts()}) is None

"""docs/reference/api.md names every field that is read or refused, every series that is shown, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic.alias_generators import to_camel

from hpu_engine.contract import (
    EXIT_CODES,
    BucketRun,
    CardHealth,
    ControlState,
    GateResult,
    GroupMember,
    RankState,
    RecipeCache,
    TerminationMessage,
    WarmUp,
    WorkerState,
)
from hpu_engine.scheduling import sampling_params
from hpu_engine.server.api import prompts, protocol
from hpu_engine.server.metrics import Metrics
from hpu_engine.server.requests import sequence_request

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def first_cells(title: str) -> set[str]:
    """The names in the first column of a section's table."""
    rows = [line.split("|")[1] for line in section(title).splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_fields_of_both_routes_are_those_that_are_read() -> None:
    completions = set(protocol.CompletionRequest.model_fields) | {"prompt"}
    chats = set(protocol.ChatCompletionRequest.model_fields)
    both = first_cells("Fields of both routes")
    assert both | first_cells("Fields of completions") == completions
    assert both | first_cells("Fields of chats") == chats


def test_the_refused_fields_are_those_that_are_refused() -> None:
    named = set(re.findall(r"`(\w+)`", section("Refused")))
    assert named == set(protocol._NEUTRAL) | set(protocol._NEUTRAL_IN_CHATS)


def test_the_series_are_those_that_are_shown() -> None:
    shown = {family.name for family in Metrics("m").registry.collect()}
    assert first_cells("Metrics") == shown


@pytest.mark.parametrize(
    ("title", "field", "limit"),
    [
        ("Fields of both routes", "n", protocol.MAX_SAMPLES),
        ("Fields of both routes", "n", protocol.MAX_SEQUENCES),
        ("Fields of both routes", "stop", protocol.MAX_STOP_STRINGS),
        ("Fields of both routes", "stop", protocol.MAX_STOP_CHARS),
        ("Fields of both routes", "stop_token_ids", protocol.MAX_STOP_TOKEN_IDS),
        ("Fields of both routes", "logit_bias", protocol.MAX_BIASED_TOKENS),
        ("Fields of both routes", "prompt_logprobs", sampling_params.MOST_LOGPROBS),
        ("Log-probabilities", "", sequence_request.MAX_SCORES),
        ("Fields of both routes", "repetition_penalty", sampling_params.LEAST_REPETITION_PENALTY),
        ("Fields of both routes", "repetition_penalty", int(sampling_params.MOST_REPETITION_PENALTY)),
        ("Fields of completions", "prompt", prompts.MAX_PROMPTS),
        ("Fields of completions", "logprobs", sampling_params.MOST_LOGPROBS),
        ("Fields of chats", "messages", protocol.MAX_MESSAGES),
    ],
)
def test_a_limit_is_the_codes(title: str, field: str, limit: float) -> None:
    text = section(title)
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{field}`")] if field else [text]
    assert re.search(rf"(?<![\d.]){re.escape(str(limit))}(?![\d.]\d)", row)


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_the_fields_of_the_state_are_those_that_are_shown() -> None:
    named = first_cells("State")
    assert {name for name in named if "." not in name} == {to_camel(name) for name in ControlState.model_fields} - {
        "ranks"
    }
    assert {name for name in named if "." in name} == {f"ranks[].{to_camel(name)}" for name in RankState.model_fields}
    rows = dict(re.findall(r"^\| `([^`]+)`[^|]*\|(.*)\|$", section("State"), re.MULTILINE))
    parts = {
        "member": (GroupMember,),
        "gate": (GateResult,),
        "ranks[].recipeCache": (RecipeCache,),
        "ranks[].warmUp": (WarmUp, BucketRun),
        "ranks[].workers": (WorkerState, CardHealth),
    }
    for row, kinds in parts.items():
        fields = [name for kind in kinds for name in kind.__annotations__ if not name.startswith(("_", "model_"))]
        assert names_in(rows[row]) == {to_camel(name) for name in fields}, row


def test_the_termination_message_and_its_exit_codes_are_the_codes() -> None:
    text, _, table = section("Termination message").partition("| exit code")
    assert names_in(text) - {"Internal"} == {to_camel(name) for name in TerminationMessage.model_fields}
    rows = {int(code): names_in(reasons) for code, reasons in re.findall(r"^\| (\d) \|(.*)\|$", table, re.MULTILINE)}
    told = {reason: code for code, reasons in rows.items() for reason in reasons}
    assert told == {reason.value: int(code) for reason, code in EXIT_CODES.items()}

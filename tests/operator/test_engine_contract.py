"""What the operator tells the engine is what the engine understands, and what it says is what the operator reads."""

from __future__ import annotations

from typing import Any

import pytest

from hpu_engine.contract import API_PORT, CONTROL_PORT, FailureReason, GroupMember
from hpu_engine.settings.serve import ServeSettings, load_settings
from hpu_operator.api.crd import structural_schema
from hpu_operator.api.inference import Spec
from hpu_operator.domain.diagnosis.causes import ENGINE_REASONS
from hpu_operator.domain.engine_arguments import LAME_DUCK_SECONDS, engine_arguments
from hpu_operator.domain.names import GroupId, stateful_set
from tests.operator.objects import spec


def understood(**changes: Any) -> ServeSettings:
    """The settings the engine makes of the arguments for a spec."""
    command, *arguments = engine_arguments("smol", spec(**changes))
    assert command == "serve"
    pairs = (argument.removeprefix("--").partition("=") for argument in arguments)
    return load_settings({flag.replace("-", "_"): value for flag, _, value in pairs})


def test_the_engine_understands_every_argument() -> None:
    settings = understood(
        drainSeconds=45,
        model={"uri": "pvc://models/smollm2", "servedName": "Org/Model:v1"},
        engine={
            "dtype": "bfloat16",
            "maxModelLen": 4096,
            "maxNumSeqs": 8,
            "blockSize": 64,
            "chunkedPrefill": {"maxBatchedTokens": 512},
        },
    )
    assert str(settings.model) == "/mnt/model/smollm2"
    assert settings.model_name == "Org/Model:v1"
    assert (settings.port, settings.control_port) == (API_PORT, CONTROL_PORT)
    assert (settings.lame_duck_seconds, settings.drain_seconds) == (LAME_DUCK_SECONDS, 45)
    assert (settings.dtype, settings.max_model_len, settings.max_num_seqs) == ("bfloat16", 4096, 8)
    assert (settings.block_size, settings.max_num_batched_tokens) == (64, 512)


@pytest.mark.parametrize("field", ["device", "dtype", "blockSize"])
def test_the_engine_understands_every_choice_the_api_offers(field: str) -> None:
    engine = structural_schema(Spec)["properties"]["engine"]["properties"]
    for choice in engine[field]["enum"]:
        understood(engine={field: choice})


def test_defaults_of_the_api_are_the_engines() -> None:
    for field in ("max_num_seqs", "block_size", "device", "dtype"):
        assert getattr(understood(), field) == ServeSettings.model_fields[field].default, field


def test_every_reason_of_the_engine_has_one_in_status() -> None:
    assert set(ENGINE_REASONS) == set(FailureReason)


def test_a_pod_finds_its_place_in_the_name_the_operator_gives_it() -> None:
    group = GroupId(index=12, revision="1a2b3c4d", attempt=3)
    found = GroupMember.from_pod_name(f"{stateful_set('my-model-with-a-name-that-is-far-too-long', group)}-1")
    assert found == GroupMember(group=12, revision="1a2b3c4d", attempt=3, pod_index=1)

"""Programs of this version and of the one before it read each other (`previous_version` is what that one wrote)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from hpu_engine.contract import (
    BucketRun,
    CardHealth,
    ControlState,
    FailureReason,
    GateResult,
    GroupMember,
    ModelRead,
    Phase,
    RankState,
    RecipeCache,
    TerminationMessage,
    WarmUp,
    WorkerState,
    parse_ending,
)
from hpu_engine.planning import ModelDescription, describe
from hpu_engine.wire import framing
from hpu_engine.wire.messages import Fatal, Heartbeat, Progress, ToServer, ToWorker
from tests.server.conftest import CONFIG

PREVIOUS = Path(__file__).parent / "previous_version"
MEMBER = GroupMember(group=2, revision="1a2b3c4d", attempt=3, pod_index=1, epoch="f00d")


def previous(name: str) -> Any:
    return json.loads((PREVIOUS / name).read_text())


def is_kept(old: Any, new: Any) -> bool:
    """Whether all that the old document says is in the new one, unchanged."""
    if isinstance(old, dict):
        return all(key in new and is_kept(value, new[key]) for key, value in old.items())
    if isinstance(old, list):
        return len(old) == len(new) and all(map(is_kept, old, new))
    return bool(old == new)


def whole_state() -> ControlState:
    """The previous version's state with everything that this version adds."""
    state = ControlState.model_validate(previous("state.json"))
    runs = (BucketRun(bucket="tokens=256", seconds=1.5, peak_bytes=7, free_bytes=5, compiled=True),)
    rank = state.ranks[0].model_copy(
        update={
            "warm_up": state.ranks[0].warm_up.model_copy(update={"planned_seconds": 9.0, "compiled": 1, "runs": runs}),
            "workers": (WorkerState(worker=1, phase=Phase.LOADING, card=CardHealth(healthy=False, problem="ECC")),),
            "settled_digest": "abc",
            "recipe_cache": RecipeCache(hits=1, misses=2, bytes=3),
        }
    )
    update = {
        "ranks": (rank, state.ranks[1]),
        "member": MEMBER,
        "downloaded_bytes": 1,
        "download_bytes": 2,
        "gate": GateResult(passed=True),
    }
    return state.model_copy(update=update)


def test_a_state_of_the_previous_version_is_read_and_what_it_did_not_say_is_not_known() -> None:
    state = ControlState.model_validate(previous("state.json"))
    assert is_kept(previous("state.json"), json.loads(state.model_dump_json(by_alias=True)))
    assert (state.member, state.gate, state.download_bytes) == (None, None, None)
    rank = state.ranks[0]
    assert (rank.workers, rank.settled_digest, rank.recipe_cache) == ((), None, None)
    assert (rank.warm_up.planned_seconds, rank.warm_up.compiled, rank.warm_up.runs) == (None, None, ())


def test_a_state_of_this_version_is_read_by_the_previous_one_and_says_the_same_to_it() -> None:
    new = json.loads(whole_state().model_dump_json(by_alias=True))
    jsonschema.validate(new, previous("state.schema.json"))
    assert is_kept(previous("state.json"), new)
    assert ControlState.model_validate(new) == whole_state()


def test_a_termination_message_of_the_previous_version_is_read() -> None:
    told = TerminationMessage.parse((PREVIOUS / "termination_message.json").read_text())
    assert told is not None
    assert (told.reason, told.worker, told.signal) == (FailureReason.WORKER_LOST, 0, "SIGKILL")
    assert (told.seen_at, told.member) == (None, None)


def test_a_termination_message_of_this_version_is_read_by_the_previous_one() -> None:
    old = previous("termination_message.json")
    told = TerminationMessage.model_validate(old).model_copy(update={"seen_at": 1.5, "member": MEMBER})
    jsonschema.validate(json.loads(told.encode()), previous("termination_message.schema.json"))
    assert is_kept(old, json.loads(told.encode()))


def test_a_reason_of_a_later_version_is_internal() -> None:
    told = TerminationMessage.parse('{"reason": "Moonshine", "message": "why", "phaseOfTheMoon": 3}')
    assert told == TerminationMessage(reason=FailureReason.INTERNAL, message="why")


@pytest.mark.parametrize("direction", ["to_worker", "to_server"])
def test_messages_of_the_previous_version_are_read_and_nothing_they_say_has_changed(direction: str) -> None:
    decode = framing.decode_to_worker if direction == "to_worker" else framing.decode_to_server
    kinds: Any = ToWorker if direction == "to_worker" else ToServer
    for old in previous("messages.json")[direction]:
        message = decode(msgspec.msgpack.encode({**old, "aKeyOfTomorrow": 1}))
        assert is_kept(old, msgspec.to_builtins(message))
        assert msgspec.convert(old, kinds) == message


def test_facts_of_a_worker_arrive_as_they_were_sent() -> None:
    sent: list[ToServer] = [
        Progress(phase=Phase.WARMING_UP, worker=3, planned_seconds=2.0, ran=BucketRun(bucket="a", seconds=1.0)),
        Heartbeat(
            steps=0,
            running=0,
            waiting=0,
            kv_blocks_used=0,
            kv_blocks_total=0,
            card=CardHealth(healthy=True),
            recipe_cache=RecipeCache(hits=1, misses=0),
        ),
        Fatal(reason=FailureReason.PEER_LOST, message="worker 1 is gone", worker=3),
    ]
    for message in sent:
        assert framing.decode_to_server(framing.encode_frame(message)[framing.HEADER_BYTES :]) == message


def test_what_a_reader_of_models_found_fits_a_termination_message_and_is_no_failure() -> None:
    model: ModelDescription = describe(CONFIG, "config.json")
    text = ModelRead(model=model).encode().decode()
    assert parse_ending(text) == ModelRead(model=model)
    assert TerminationMessage.parse(text) is None, "a reader that only knows failures takes it for another text"
    failure = TerminationMessage(reason=FailureReason.MODEL_BROKEN, message="m", member=MEMBER, seen_at=2.0)
    assert parse_ending(failure.encode().decode()) == failure
    assert parse_ending("panic: out of cheese") is None


def test_a_whole_warm_up_of_eight_ranks_stays_far_below_what_the_operator_reads() -> None:
    run = BucketRun(bucket="decode (512, 131072)", seconds=12.345678, peak_bytes=10**11, free_bytes=10**11)
    rank = RankState(
        rank=0, phase=Phase.READY, heartbeat_age_seconds=None, warm_up=WarmUp(done=512, total=512, runs=(run,) * 512)
    )
    state = whole_state().model_copy(update={"ranks": (rank,) * 8})
    assert len(state.model_dump_json(by_alias=True)) < 1 << 20

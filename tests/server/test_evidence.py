"""Which of several endings is the cause, and what is told of it."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from hpu_engine.contract import FailureReason
from hpu_engine.server.pod.evidence import Ending, Silence, cause_of, evidence_of, is_conclusive
from hpu_engine.wire.messages import Fatal


def ending(worker: int = 0, seen_at: float = 0.0, *, says: FailureReason | None = None, **change: Any) -> Ending:
    words = None if says is None else Fatal(reason=says, message=f"{says} of worker {worker}", worker=worker)
    facts = {"return_code": 1, "bucket": "tokens=8", "last_words": words, **change}
    return Ending(rank=0, worker=worker, pid=7, seen_at=seen_at, **facts)


VICTIM = ending(1, 0.0, says=FailureReason.PEER_LOST, return_code=6)
WAITED = ending(2, 0.1, silence=Silence(seconds=8.0, is_stopped=False), was_ours=True, return_code=-9)
STOPPED = ending(3, 0.2, silence=Silence(seconds=8.0, is_stopped=True), was_ours=True, return_code=-9)
OWN_CAUSES = [
    ending(4, 0.3),
    ending(4, 0.3, return_code=-9),
    ending(4, 0.3, says=FailureReason.MODEL_BROKEN),
    ending(4, 0.3, says=FailureReason.MISMATCH),
    STOPPED,
]


@pytest.mark.parametrize("own", OWN_CAUSES)
def test_a_cause_outweighs_consequences_that_were_seen_before_it(own: Ending) -> None:
    for order in permutations((VICTIM, WAITED, own)):
        assert cause_of(order) == evidence_of(own)
    assert is_conclusive([VICTIM, WAITED, own])


def test_silence_outweighs_a_lost_peer_and_neither_is_conclusive() -> None:
    assert cause_of([VICTIM, WAITED]) == evidence_of(WAITED)
    assert not is_conclusive([VICTIM, WAITED])
    assert cause_of([VICTIM]).reason is FailureReason.PEER_LOST


def test_the_earlier_one_of_equal_causes_counts() -> None:
    early, late = ending(1, 1.0), ending(0, 2.0)
    assert cause_of([late, early]).worker == 1


def test_last_words_are_told_with_how_the_process_ended() -> None:
    told = evidence_of(ending(2, 5.0, says=FailureReason.MODEL_BROKEN, return_code=3))
    assert (told.reason, told.message) == (FailureReason.MODEL_BROKEN, "ModelBroken of worker 2")
    assert (told.rank, told.worker, told.exit_code, told.signal, told.seen_at) == (0, 2, 3, None, 5.0)


def test_a_signal_is_named_unless_the_server_sent_it() -> None:
    killed = evidence_of(ending(return_code=-9))
    assert (killed.signal, killed.exit_code) == ("SIGKILL", None)
    assert "out-of-memory" in killed.message
    ours = evidence_of(ending(return_code=-9, was_ours=True))
    assert (ours.signal, ours.exit_code) == (None, None)
    assert "did not exit within" in ours.message
    assert evidence_of(ending(return_code=-64)).signal in ("SIGRTMAX", "signal 64")


def test_the_line_of_a_crash_that_says_most_is_told() -> None:
    lines = ("Traceback (most recent call last):", '  File "x.py"', "ValueError: no", "more", "")
    assert evidence_of(ending(stderr=lines)).message.endswith("it said: ValueError: no")
    assert evidence_of(ending(stderr=("a", "b", " "))).message.endswith("it said: b")

"""What travels of a step: the same numbers come out, few bytes go in, and other bytes are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_engine.scheduling.request import Request
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Row
from hpu_engine.step.input import RowInput, StepInput, StepInputError, input_of, output_of

NUMBERS = st.integers(0, 2**31 - 1)


@st.composite
def row_inputs(draw: st.DrawFn) -> RowInput:
    tokens = draw(st.lists(NUMBERS, min_size=1, max_size=8))
    if len(tokens) == 1 and draw(st.booleans()):
        tokens = [output_of(draw(st.integers(0, 1000)))]
    return RowInput(
        tokens, draw(st.lists(NUMBERS, max_size=6)), *draw(st.tuples(NUMBERS, st.booleans(), NUMBERS, NUMBERS))
    )


@given(st.lists(row_inputs(), max_size=6))
def test_a_step_comes_back_as_it_was(rows: list[RowInput]) -> None:
    step = StepInput(tuple(rows))
    assert StepInput.decode(step.encode()) == step
    assert step.refers_back == any(token < 0 for row in rows for token in row.token_ids)


@given(st.lists(row_inputs(), max_size=6))
def test_a_row_takes_24_bytes_and_4_for_each_token_and_block(rows: list[RowInput]) -> None:
    numbers = sum(len(row.token_ids) + len(row.blocks) for row in rows)
    assert len(StepInput(tuple(rows)).encode()) == 4 + 24 * len(rows) + 4 * numbers


def test_a_decoding_row_of_2048_tokens_takes_92_bytes() -> None:
    request = Request("r", list(range(2048)), SamplingParams(), seed=0)
    request.blocks = list(range(1, 17))
    step = input_of([Row(request, 2047, 1, emits=True)], block_size=128)
    assert step.rows == (RowInput([2047], request.blocks, 2047, emits=True),)
    assert len(step.encode()) - len(StepInput().encode()) == 92


@given(st.lists(row_inputs(), min_size=1, max_size=4), st.data())
def test_a_frame_that_was_cut_or_has_something_behind_it_is_refused(rows: list[RowInput], data: st.DataObject) -> None:
    frame = StepInput(tuple(rows)).encode()
    with pytest.raises(StepInputError):
        StepInput.decode(frame[: data.draw(st.integers(0, len(frame) - 1))])
    with pytest.raises(StepInputError):
        StepInput.decode(frame + bytes(data.draw(st.integers(1, 9))))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_step_or_refused(frame: bytes) -> None:
    try:
        step = StepInput.decode(frame)
    except StepInputError:
        return
    assert step.encode() == frame


def test_later_growth_of_a_request_does_not_change_a_step_that_was_made() -> None:
    request = Request("r", [5, 6, 7], SamplingParams(), seed=0)
    request.blocks = [3]
    step = input_of([Row(request, 0, 3, emits=True)], block_size=4)
    request.tokens.append(8)
    request.blocks.append(4)
    assert step.rows[0] == RowInput([5, 6, 7], [3], 0, emits=True)

"""The socket between server and worker: what goes in one end comes out of the other, and nothing else gets through."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.wire import framing as wire
from hpu_engine.wire import messages


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    server, worker = socket.socketpair()
    with server, worker:
        yield server, worker


async def test_messages_of_both_directions_arrive_whole_and_in_order(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    server = await wire.ServerConnection.open(ends[0])
    worker = wire.WorkerConnection(ends[1])
    down: list[messages.ToWorker] = [
        messages.Configure(config=EngineConfig(model="/m")),
        messages.Submit(request_id="a", prompt_token_ids=tuple(range(10_000)), params=SamplingParams(seed=2**63 - 1)),
        messages.Abort(request_ids=("a",)),
    ]
    for message in down:
        server.send(message)
    assert [worker.receive() for _ in down] == down

    row = messages.RowOutput(request_id="a", token_ids=(1, 2), finish="stop", stop_token_id=2)
    up = messages.StepOutputs(rows=(row,), step_seconds=0.5, batched_tokens=3)
    worker.send(up)
    assert await server.receive() == up
    worker.close()
    assert await server.receive() is None
    server.close()


def test_pending_messages_are_taken_without_waiting_even_when_the_server_then_left(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    worker = wire.WorkerConnection(ends[1])
    assert worker.receive_pending() == ([], True)
    frames = [wire.encode_frame(messages.Abort(request_ids=(name,))) for name in "ab"]
    ends[0].sendall(frames[0] + frames[1][:7])
    assert worker.receive_pending() == ([messages.Abort(request_ids=("a",))], True)
    ends[0].sendall(frames[1][7:])
    ends[0].close()
    assert worker.receive_pending() == ([messages.Abort(request_ids=("b",))], False)


def test_a_server_that_dies_inside_a_frame_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    worker = wire.WorkerConnection(ends[1])
    ends[0].sendall(wire.encode_frame(messages.Stop())[:-1])
    ends[0].close()
    with pytest.raises(wire.WireError, match="inside a frame"):
        worker.receive()


def test_an_announced_size_above_the_limit_is_refused_before_it_is_read(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    worker = wire.WorkerConnection(ends[1])
    ends[0].sendall((messages.FRAME_LIMIT_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(wire.WireError, match=str(messages.FRAME_LIMIT_BYTES)):
        worker.receive()


def test_a_message_of_the_other_direction_does_not_decode() -> None:
    with pytest.raises(wire.WireError, match="not a message for a worker"):
        wire.decode_to_worker(wire.encode_frame(messages.Ready())[wire.HEADER_BYTES :])


async def test_samples_get_the_prompt_that_is_sent_once(ends: tuple[socket.socket, socket.socket]) -> None:
    server = await wire.ServerConnection.open(ends[0])
    worker = wire.WorkerConnection(ends[1])
    first = messages.Submit(request_id="a", prompt_token_ids=tuple(range(1000)), params=SamplingParams())
    others = [replace(first, request_id=name, prompt_token_ids=(), shares_prompt_with="a") for name in "bc"]
    for message in (first, *others):
        server.send(message)
    received = [worker.receive() for _ in range(3)]
    assert received == [first, *(replace(other, prompt_token_ids=first.prompt_token_ids) for other in others)]
    assert max(len(wire.encode_frame(other)) for other in others) < len(wire.encode_frame(first)) / 4
    server.send(replace(first, request_id="d", prompt_token_ids=(), shares_prompt_with="elsewhere"))
    with pytest.raises(wire.WireError, match="without a prompt"):
        worker.receive()
    server.close()
    worker.close()


def test_garbage_does_not_decode() -> None:
    with pytest.raises(wire.WireError, match="not a message for the server"):
        wire.decode_to_server(b"\xc1\x00garbage")

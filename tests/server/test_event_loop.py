"""The event loop belongs to every stream and probe: what a large body costs is paid in another thread."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpu_engine.server.api.parsing import MAX_MEMBERS, READ_AT_ONCE, parse_object
from hpu_engine.server.errors import ApiError
from hpu_engine.text.tokenizer import load_tokenizer
from tests.server.running import RunningServer, post

PARTS = [{"type": "text", "text": "a"}] * 80_000
UNKNOWN = {f"k{number}": number for number in range(200_000)}
TEXTS = ["abcdefg " * 60] * 250
IDS = [[65 + place % 250 for place in range(500)] for _ in range(250)]


def loop_seconds(server: RunningServer) -> float:
    """What the event loop's thread has computed so far."""
    pid = server.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def process_seconds(server: RunningServer) -> float:
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": TEXTS, "max_tokens": 1}),
        ("completions", {"prompt": IDS, "max_tokens": 0, "echo": True}),
        ("completions", {"prompt": "a", "max_tokens": 1, **UNKNOWN}),
        ("chat/completions", {"messages": [{"role": "user", "content": PARTS}]}),
    ],
    ids=["texts", "echoed ids", "unknown fields", "text parts"],
)
def test_a_large_body_is_read_in_another_thread(echo: RunningServer, path: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    post(f"{echo.url}/v1/{path}", data)
    loop, process = loop_seconds(echo), process_seconds(echo)
    status, answer = post(f"{echo.url}/v1/{path}", data)
    loop, process = loop_seconds(echo) - loop, process_seconds(echo) - process
    assert status in (200, 400), answer
    print(f"{loop:.3f} s of {process:.3f} s in the event loop")
    assert loop < 0.5 * process


def turns_beside(work: Callable[[], object]) -> int:
    """How often another thread has its turn while `work` runs."""
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        work()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    turns = 0
    while not ended.is_set():
        turns += 1
        time.sleep(0.001)
    thread.join()
    return turns


def test_tokenizing_lets_other_threads_run(shell: Path) -> None:
    tokenizer = load_tokenizer(shell)
    text = "A request is a list of tokens. " * 20_000
    for work in (tokenizer.encode_now, tokenizer.offsets):
        assert turns_beside(partial(work, text, add_special_tokens=True)) > 10


@pytest.mark.parametrize(
    "body",
    [{"messages": [{"role": "user", "content": PARTS}]}, {"prompt": "a", "x": [{} for _ in range(200_000)]}],
    ids=["text parts", "empty objects"],
)
def test_reading_many_elements_lets_other_threads_run(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    assert turns_beside(lambda: parse_object(data)) > 20
    assert parse_object(data) == body
    assert gc.isenabled()


def test_both_ways_of_reading_take_and_refuse_the_same() -> None:
    many = b',"z":[' + b"{}," * READ_AT_ONCE + b"{}]"
    for value in (b"NaN", b"-Infinity", b"1e999", b"9" * 30, b'"\\ud83d\\ude00"', b'"\xc3\xa9"', b'{"a":1,"a":2}'):
        few = parse_object(b'{"a":' + value + b"}")["a"]
        assert repr(parse_object(b'{"a":' + value + many + b"}")["a"]) == repr(few)
    for value in (b"", b"9" * 10_000, b'"\\ud800"', b'"\xff"', b"[" * 9000, b"01", b'"\n"', b"{1:2}"):
        for rest in (b"", many):
            with pytest.raises(ApiError):
                parse_object(b'{"a":' + value + rest + b"}")


def test_an_object_of_countless_members_is_refused(echo: RunningServer) -> None:
    status, answer = post(f"{echo.url}/v1/completions", {"prompt": "a", **UNKNOWN})
    assert (status, answer["error"]["param"]) == (400, "body")
    assert f"at most {MAX_MEMBERS}" in answer["error"]["message"]

"""A server whose chat template is broken or a bomb: completions and other clients notice nothing."""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from tests.server.running import PATIENCE_SECONDS, RunningServer, get, post

BOMBS = (
    "{% set kind = messages[-1].content %}"
    "{% if kind == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif kind == 'string' %}{{ 'x' * (10 ** 10 + messages | length) }}"
    "{% elif kind == 'power' %}{{ (messages | length + 2) ** (3 ** 17) }}"
    "{% else %}{{ kind }}{% endif %}"
)
COMPLETION = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
HIGHEST_P99_MOVE_SECONDS = 0.010


def with_template(shell: Path, folder: Path, source: bytes, name: str = "chat_template.jinja") -> Path:
    shutil.copytree(shell, folder)
    (folder / name).write_bytes(source)
    return folder


def chat(server: RunningServer, text: str, **fields: object) -> tuple[int, dict[str, dict[str, str]]]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}
    return post(f"{server.url}/v1/chat/completions", body)


@pytest.mark.parametrize(
    ("source", "problem"),
    [(b"{% for %}", "does not compile (line 1: "), (b"\xff\xfe", "chat_template.jinja cannot be read: 'utf-8'")],
    ids=["syntax", "encoding"],
)
def test_a_template_that_cannot_be_used_ends_chats_alone(
    shell: Path, tmp_path: Path, source: bytes, problem: str
) -> None:
    with RunningServer(with_template(shell, tmp_path / "model", source), {}) as server:
        server.wait_until_ready()
        assert post(f"{server.url}/v1/completions", COMPLETION)[0] == 200
        status, answer = chat(server, "hi")
        error = answer["error"]
        assert (status, error["param"]) == (400, "messages"), answer
        assert problem in error["message"]
        assert "use /v1/completions" in error["message"]
        assert "chats are refused, completions are served" in server.log


@pytest.fixture(scope="module")
def bombed(shell: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = with_template(shell, tmp_path_factory.mktemp("bombs") / "model", BOMBS.encode())
    with RunningServer(model, {"step_seconds": 0.005}) as server:
        yield server.wait_until_ready()


def p99_of_gaps(server: RunningServer, seconds: float) -> float:
    """Between the tokens of four streams that run for a while."""

    def gaps(_: int) -> list[float]:
        found: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            body = {**COMPLETION, "prompt": "abcdefg", "max_tokens": 400, "stream": True, "ignore_eos": True}
            data = json.dumps(body).encode()
            request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                moments = [time.monotonic() for line in answer if line.startswith(b"data: {")]
            found += [after - before for before, after in pairwise(moments)]
        return found

    with ThreadPoolExecutor(4) as clients:
        found = sorted(gap for each in clients.map(gaps, range(4)) for gap in each)
    return found[len(found) * 99 // 100]


def test_bombs_do_not_move_the_tokens_of_other_clients(bombed: RunningServer) -> None:
    assert chat(bombed, "hi")[0] == 200
    quiet = p99_of_gaps(bombed, 2.0)
    stop = threading.Event()
    slowest: list[float] = []

    def bomber() -> None:
        while not stop.is_set():
            for kind in ("loop", "string", "power"):
                began = time.monotonic()
                status, _ = chat(bombed, kind)
                slowest.append(time.monotonic() - began)
                assert status in (400, 429)

    with ThreadPoolExecutor(1) as bombers:
        bombing = bombers.submit(bomber)
        crowded = p99_of_gaps(bombed, 3.0)
        stop.set()
        bombing.result()
    quiet = max(quiet, p99_of_gaps(bombed, 2.0))  # the machine has other guests
    print(f"p99 {quiet * 1e3:.1f} ms quiet, {crowded * 1e3:.1f} ms with bombs; slowest refusal {max(slowest):.2f} s")
    assert max(slowest) < 2.0
    assert crowded - quiet <= HIGHEST_P99_MOVE_SECONDS
    assert chat(bombed, "hi")[0] == 200


def test_many_bombs_at_once_are_all_refused_in_time(bombed: RunningServer) -> None:
    def bomb(_: int) -> tuple[int, float]:
        began = time.monotonic()
        return chat(bombed, "loop")[0], time.monotonic() - began

    with ThreadPoolExecutor(16) as clients:
        answers = clients.map(bomb, range(16))
        time.sleep(0.2)
        assert get(f"{bombed.control_url}/livez")[0] == 200
        assert post(f"{bombed.url}/v1/completions", {**COMPLETION, "prompt": "abc " * 4000})[0] in (200, 400)
        results = list(answers)
    print(results)
    assert {status for status, _ in results} <= {400, 429}
    assert max(seconds for _, seconds in results) < 2.5


def test_a_crowd_of_chats_is_answered_in_full(bombed: RunningServer) -> None:
    with ThreadPoolExecutor(32) as clients:
        answers = clients.map(lambda number: chat(bombed, f"chat {number}")[0], range(300))
    assert set(answers) == {200}

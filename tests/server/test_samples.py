"""Several samples of one prompt: their order, their seeds, what they count as, and how they end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from hpu_engine.server.api.protocol import CompletionRequest
from hpu_engine.server.metrics import Metrics
from hpu_engine.server.model_files import load_model
from hpu_engine.server.pod.pod import Pod
from hpu_engine.server.pod.served_rank import ServedRank
from hpu_engine.server.requests.admission import Admission
from hpu_engine.server.requests.sequence_request import make_sequence_request, sample_seed
from hpu_engine.settings.serve import load_settings
from hpu_engine.wire.framing import ServerConnection
from hpu_engine.wire.messages import Submit, ToWorker
from tests.server.running import RunningServer, post

TURNS: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(echo: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_samples_stand_prompt_by_prompt(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": ["xyz", "uvw"], "n": 3, "max_tokens": 3}
    texts, reasons = [""] * 6, [""] * 6
    for answer in (
        client.completions.create(stream=True, **options) if stream else [client.completions.create(**options)]
    ):
        for choice in answer.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == ["xyz", "yzx", "zxy", "uvw", "vwu", "wuv"]
    assert reasons == ["length"] * 6


async def test_a_prompt_is_sent_to_the_worker_once_for_all_its_samples(shell: Path) -> None:
    """Writing it for each would keep everybody waiting: 128 times 150,000 tokens took 0.6 s of the event loop."""
    sent: list[ToWorker] = []

    class Line(ServerConnection):
        def __init__(self) -> None:
            pass

        def send(self, message: ToWorker) -> None:
            sent.append(message)

    rank = ServedRank(0, Metrics("tiny").for_rank(0))
    rank.connect(Line())
    prompts = [(1, 2, 3), (4, 5)]
    model = load_model(shell)
    request = CompletionRequest.model_validate({"n": 3, "prompt": "?"})
    wanted = [
        make_sequence_request(prompt, request, 4, model, continues=True, prompt_field="prompt") for prompt in prompts
    ]
    settings = load_settings({"model": str(shell)})
    Admission(Pod([rank], settings.identity(), settings.plan_input()), 100).open(wanted)
    submits = [message for message in sent if isinstance(message, Submit)]
    assert [submit.prompt_token_ids for submit in submits] == [(1, 2, 3), (), (), (4, 5), (), ()]


@pytest.mark.parametrize("stream", [False, True])
def test_samples_of_a_chat_each_have_a_role_and_an_end(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": TURNS,
        "n": 3,
        "max_tokens": 4,
        "extra_body": {"ignore_eos": True},
    }
    if not stream:
        choices = client.chat.completions.create(**options).choices
        assert [choice.index for choice in choices] == [0, 1, 2]
        assert {choice.message.role for choice in choices} == {"assistant"}
        return
    roles: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    ends: list[int] = []
    for chunk in client.chat.completions.create(stream=True, **options):
        (choice,) = chunk.choices
        assert choice.index not in ends
        roles[choice.index].append(choice.delta.role)
        if choice.finish_reason is not None:
            ends.append(choice.index)
    assert sorted(ends) == [0, 1, 2]
    for own in roles.values():
        assert own[0] == "assistant"
        assert set(own[1:]) <= {None}


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_counts_once_however_many_samples_it_has(
    echo: RunningServer, client: openai.OpenAI, stream: bool
) -> None:
    before = echo.metric("vllm:prompt_tokens_total")
    options: dict[str, Any] = {"model": "tiny", "prompt": [[70, 71], [72, 73, 74]], "n": 4, "max_tokens": 5}
    if stream:
        usage = {"include_usage": True}
        *_, last = client.completions.create(stream=True, stream_options=usage, **options)  # type: ignore[call-overload]
    else:
        last = client.completions.create(**options)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 40)
    assert echo.metric("vllm:prompt_tokens_total") == before + 5


def test_one_sample_may_stop_while_the_others_go_on(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abcd", n=2, max_tokens=3, stop=["abc"])
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [("", "stop"), ("bcd", "length")]


def test_min_tokens_hold_back_stop_strings_and_stop_ids(echo: RunningServer) -> None:
    def ask(**body: Any) -> dict[str, Any]:
        choice: dict[str, Any] = post(f"{echo.url}/v1/completions", body)[1]["choices"][0]
        return choice

    assert ask(prompt="abcabcabcd", max_tokens=10, stop="ab")["text"] == ""
    assert ask(prompt="abcabcabcd", max_tokens=10, stop="ab", min_tokens=4)["text"] == "abcabc"
    assert len(ask(prompt=[70, 71], max_tokens=10, stop_token_ids=[71], min_tokens=3)["text"]) == 3


def test_seeds_of_samples_differ_and_can_be_computed_again() -> None:
    seeds = [sample_seed(seed, number) for seed in (-5, 0, 7, 8, 2**63 - 1) for number in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(seed is not None and abs(seed) < 2**63 for seed in seeds)
    assert sample_seed(7, 0) == 7, "the first sample is the answer without n"
    assert sample_seed(7, 1) == sample_seed(7, 1) != sample_seed(8, 0)
    assert sample_seed(None, 3) is None


def test_more_sequences_than_may_ever_be_open_are_refused_for_good(shell: Any) -> None:
    """No 429: it would be tried again and again."""
    with RunningServer(shell, {"step_seconds": 0.01}, max_open_requests=6).wait_until_ready() as server:
        for prompts, n, param in ((2, 4, "n"), (7, 1, "prompt")):
            status, body = post(f"{server.url}/v1/completions", {"prompt": ["a"] * prompts, "n": n, "max_tokens": 2})
            assert (status, body["error"]["param"]) == (400, param)
            assert f"{prompts * n} sequences; this server takes at most 6" in body["error"]["message"]
        status, body = post(f"{server.url}/v1/chat/completions", {"messages": TURNS, "n": 7, "max_tokens": 2})
        assert (status, body["error"]["param"]) == (400, "n")
        status, body = post(f"{server.url}/v1/completions", {"prompt": ["a", "b"], "n": 3, "max_tokens": 2})
        assert (status, len(body["choices"])) == (200, 6)

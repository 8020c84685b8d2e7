"""What the demo says: progress from status alone, an answer's rate, text that wraps, a Helm that was killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from openai import OpenAIError

from tests.cluster.errors import ClusterError
from tests.demo import installation, progress, story
from tests.demo.__main__ import demo
from tests.demo.installation import NoModel
from tests.demo.kube import CommandFailed, Kube
from tests.demo.progress import NotReady, Object
from tests.demo.question import Answer
from tests.demo.story import WIDTH, _Wrapped
from tests.images.errors import StepFailed


def inference(generation: int = 1, observed: int = 1, *, ready: str = "False", reason: str = "Loading") -> Object:
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": "half\n  way"}
    return {
        "metadata": {"generation": generation},
        "status": {"observedGeneration": observed, "conditions": [condition]},
    }


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def follow(states: Sequence[Object | None], timeout_seconds: float = 1e9) -> list[str]:
    """The lines said while `states` pass, the last one staying."""
    clock, said = Clock(), list[str]()
    pending = list(states)

    def read() -> Object | None:
        return pending.pop(0) if len(pending) > 1 else pending[0]

    progress.wait_until(read, timeout_seconds=timeout_seconds, say=said.append, clock=clock, sleep=clock.sleep)
    return [line.split(maxsplit=2)[2] for line in said]


def test_each_news_is_one_line_and_readiness_ends_it() -> None:
    lines = follow([None, inference(), inference(), inference(ready="True", reason="Answering")])
    assert lines == ["not there yet", "Loading: half way", "Answering: half way"]


def test_a_status_about_an_older_spec_counts_for_nothing() -> None:
    old = inference(generation=2, observed=1, ready="True", reason="Answering")
    new = inference(generation=2, observed=2, ready="True", reason="Answering")
    assert follow([old, new]) == ["the operator has not seen this change yet", "Answering: half way"]


def test_silence_never_lasts_and_an_end_without_readiness_says_why() -> None:
    with pytest.raises(NotReady, match="Loading: half way"):
        follow([inference()], timeout_seconds=30)
    lines = follow([inference()] * 100 + [inference(ready="True", reason="Answering")])
    assert len(lines) == 1 + 2 + 1, "the first, two repetitions in 25 s, the last"


def test_the_rate_counts_tokens_after_the_first() -> None:
    assert Answer("", tokens=11, first_token_seconds=1.0, total_seconds=3.0).tokens_per_second == pytest.approx(5.0)
    assert Answer("", tokens=1, first_token_seconds=1.0, total_seconds=1.0).tokens_per_second == 0


def test_streamed_text_wraps_between_words_and_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = " word" * 100 + "\nnew line\n\nafter an empty one"
    writer = _Wrapped()
    for start in range(0, len(text), 5):
        writer(text[start : start + 5])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= WIDTH + 5
    assert shown.split() == text.split()
    assert all(line.startswith(_Wrapped.INDENT) for line in shown.splitlines() if line.strip())


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        ("pending-install", "uninstall"),
        ("failed", "uninstall"),
        ("uninstalling", "uninstall"),
        ("pending-upgrade", "rollback"),
        ("pending-rollback", "rollback"),
        ("deployed", None),
        (None, None),
    ],
)
def test_a_helm_that_was_killed_is_cleared_up_after(status: str | None, remedy: str | None) -> None:
    ran: list[str] = []

    class Recorded(Kube):
        def helm(self, *arguments: str, timeout_seconds: float = 300) -> str:
            ran.append(arguments[0])
            releases = [{"name": installation.RELEASE, "status": status}] if status else []
            return json.dumps(releases) if arguments[0] == "list" else ""

    installation.clear_interrupted(Recorded(Path(), Path(), Path()))
    assert ran == ["list", *([remedy] if remedy else [])]


def test_a_failing_command_is_named_with_what_it_wrote(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho no such thing >&2; exit 3\n")
    kubectl.chmod(0o755)
    config = tmp_path / "state" / "kubeconfig"
    config.parent.mkdir()
    with pytest.raises(CommandFailed, match="kubectl get x: no such thing"):
        Kube(config, tmp_path, tmp_path).kubectl("get", "x")


def test_a_command_that_does_not_answer_is_named(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\nexec sleep 60\n")
    kubectl.chmod(0o755)
    with pytest.raises(CommandFailed, match="kubectl get x: no answer in 0 s"):
        Kube(tmp_path / "kubeconfig", tmp_path, tmp_path).kubectl("get", "x", timeout_seconds=0.1)


@pytest.mark.parametrize(
    "error",
    [
        ClusterError("no cluster", "x"),
        StepFailed("no image", "x"),
        CommandFailed("no command"),
        NoModel("no model"),
        NotReady("not ready"),
        OpenAIError("no answer"),
        OSError(28, "No space left on device"),
    ],
)
def test_whatever_fails_is_said_without_a_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(story, "tell", fail)
    with pytest.raises(typer.Exit):
        demo()
    said = capsys.readouterr().err
    assert f"demo: {error}" in said
    assert "make down" in said


def test_commands_see_nothing_of_the_callers_cluster_or_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HTTPS_PROXY", "KUBERNETES_MASTER", "HELM_NAMESPACE"):
        monkeypatch.setenv(name, "elsewhere")
    environment: dict[str, Any] = Kube(tmp_path / "kubeconfig", tmp_path, tmp_path).environment()
    assert set(environment) == {"KUBECONFIG", "HOME", "PATH"}
    assert environment["HOME"] != str(Path.home())

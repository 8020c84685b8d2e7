"""The sequences that one rank works on. Each step's rows go to theirs; what a client no longer wants is aborted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from hpu_engine.server.errors import ApiError
from hpu_engine.server.requests.sequence import ServedSequence
from hpu_engine.wire.messages import Abort, Rejected, StepOutputs, Submit, ToWorker


class OpenSequences:
    """`send` takes messages to the rank's first worker, whether or not it still lives."""

    def __init__(self, send: Callable[[ToWorker], None]) -> None:
        self._send = send
        self._open: dict[str, ServedSequence] = {}

    def __len__(self) -> int:
        return len(self._open)

    def submit(self, sequence: ServedSequence, message: Submit) -> None:
        self._open[sequence.request_id] = sequence
        self._send(message)

    def release(self, sequences: Iterable[ServedSequence]) -> None:
        """Abort those of these that still run; their blocks are free one step later."""
        running = [sequence for sequence in sequences if self._open.pop(sequence.request_id, None)]
        for sequence in running:
            sequence.abort()
        self._abort([sequence.request_id for sequence in running])

    def fail_all(self, error: ApiError) -> None:
        for sequence in self._open.values():
            sequence.fail(error)
        self._open.clear()

    def take_step(self, step: StepOutputs) -> None:
        began = time.monotonic() - step.step_seconds
        for request_id in step.begun:
            if (sequence := self._open.get(request_id)) is not None:
                sequence.begin(began)
        stopped = []
        for row in step.rows:
            if (sequence := self._open.get(row.request_id)) is None:
                continue  # aborted while the step ran: surplus tokens, dropped and not counted
            sequence.take(row)
            if not sequence.is_open:
                del self._open[row.request_id]
                if row.finish is None:
                    stopped.append(row.request_id)
        self._abort(stopped)

    def take_rejection(self, rejected: Rejected) -> bool:
        """Returns whether a request that was still wanted failed inside the engine."""
        sequence = self._open.pop(rejected.request_id, None)
        if sequence is None:
            return False
        param = sequence.prompt_field if rejected.param == "prompt" else rejected.param
        sequence.fail(ApiError(500 if rejected.internal else 400, rejected.message, param=param))
        return rejected.internal

    def _abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(Abort(request_ids=tuple(request_ids)))

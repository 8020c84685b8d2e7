"""A worker that follows: it knows no request, runs what it reads from its standard input, and tells what came of it.

Its argument is the configuration as JSON. A frame is a 4-byte length and a step. For each it writes a line: a digest of
the logits of outputs and scores, then the ids of the outputs. A step may refer to these ids, so they are chosen as the
leader chooses them: the largest logit.
"""

from __future__ import annotations

import hashlib
import sys

import msgspec
import torch
from torch import Tensor

from hpu_engine.model.runner import ModelRunner
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.step.input import StepInput
from tests.engine.direct import open_quietly


def run(runner: ModelRunner, step: StepInput) -> tuple[str, list[int]]:
    """A digest of every logit of the step, and the most likely token of each output."""
    digest = hashlib.sha256()

    def take(logits: Tensor, count: int) -> None:
        digest.update(logits[:count].numpy().tobytes())

    shapes = runner.shapes.of(step)
    logits = runner.run(step, shapes, take)[: shapes.outputs.count]
    digest.update(logits.numpy().tobytes())
    ids = logits.argmax(-1)
    runner.outputs = ids
    return digest.hexdigest(), ids.tolist()


def main() -> None:
    torch.set_num_threads(1)
    runner = open_quietly(msgspec.json.decode(sys.argv[1], type=EngineConfig)).runner
    while head := sys.stdin.buffer.read(4):
        digest, ids = run(runner, StepInput.decode(sys.stdin.buffer.read(int.from_bytes(head, "big"))))
        print(digest, *ids, flush=True)


if __name__ == "__main__":
    main()

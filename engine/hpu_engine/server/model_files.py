"""What the server reads of a checkpoint: the description and the tokenizer. Weights are the worker's business."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog

from hpu_engine.contract import FailureReason, TerminationMessage
from hpu_engine.planning import ModelConfigError, ModelConfigErrorKind, ModelDescription, read_model_description
from hpu_engine.server.pod.termination import Failed
from hpu_engine.text.tokenizer import Tokenizer, end_of_sequence, load_tokenizer

log = structlog.get_logger()

_REASONS = {
    ModelConfigErrorKind.NOT_FOUND: FailureReason.MODEL_NOT_FOUND,
    ModelConfigErrorKind.BROKEN: FailureReason.MODEL_BROKEN,
    ModelConfigErrorKind.UNSUPPORTED: FailureReason.MODEL_UNSUPPORTED,
}


@dataclass(frozen=True)
class LoadedModel:
    """What the server itself read of the checkpoint."""

    description: ModelDescription
    tokenizer: Tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that any file of the checkpoint calls the end of a sequence."""
        return end_of_sequence(self.description, self.tokenizer)


def load_model(directory: Path) -> LoadedModel:
    """Raises `Failed` (exit code 3) that names the file and what is wrong with it. A chat template that cannot be used
    is no failure: completions need none.
    """
    if not directory.is_dir():
        what = "is a file" if directory.is_file() else "no such directory"
        message = f"--model {directory}: {what}; the directory of a Hugging Face checkpoint is needed"
        raise Failed(TerminationMessage(reason=FailureReason.MODEL_NOT_FOUND, message=message, path=str(directory)))
    try:
        description = read_model_description(directory)
    except ModelConfigError as error:
        raise Failed(TerminationMessage(reason=_REASONS[error.kind], message=str(error), path=error.path)) from None
    tokenizer = load_tokenizer(directory)
    if tokenizer.chat_template is not None and (problem := tokenizer.chat_template.check()) is not None:
        log.warning("chats are refused, completions are served", reason=problem)
    return LoadedModel(description, tokenizer)

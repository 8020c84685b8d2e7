"""The error every refusal of a checkpoint's tensors is raised as."""

from __future__ import annotations

from hpu_engine.contract import FailureReason


class WeightsError(Exception):
    """A checkpoint cannot be loaded. Names the file and, where one is at fault, the tensor."""

    def __init__(
        self,
        message: str,
        *,
        path: str,
        tensor: str | None = None,
        reason: FailureReason = FailureReason.MODEL_BROKEN,
    ) -> None:
        self.reason = reason
        self.message = message
        self.path = path
        self.tensor = tensor
        where = f"{path}: {tensor}" if tensor else path
        super().__init__(f"{where}: {message}")

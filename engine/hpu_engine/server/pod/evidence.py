"""From the ways in which workers ended to the one cause that is told. Pure, over frozen endings.

A cause outweighs its consequences, whichever was seen first. A worker that lost a peer says so, and ranks below every
other cause. A worker that fell silent without being stopped may have waited for a peer, and ranks between the two.
Between equal causes the earlier one counts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from hpu_engine.contract import FailureReason, TerminationMessage
from hpu_engine.wire.messages import Fatal

EXIT_SECONDS = 5.0
"""How long a worker may live on after it has closed its socket."""


@dataclass(frozen=True, kw_only=True)
class Silence:
    """A serving worker said nothing for so long that it was killed. `is_stopped` by a signal, as the kernel says."""

    seconds: float
    is_stopped: bool


@dataclass(frozen=True, kw_only=True)
class Ending:
    """All that is known of the end of one worker's process.

    `return_code` is negative for a signal, as in `subprocess`; `was_ours` when the server sent it. `seen_at` in Unix
    seconds.
    """

    rank: int
    worker: int
    pid: int
    return_code: int
    seen_at: float
    was_ours: bool = False
    silence: Silence | None = None
    last_words: Fatal | None = None
    protocol_error: str | None = None
    stderr: tuple[str, ...] = ()
    bucket: str | None = None


def cause_of(endings: Iterable[Ending]) -> TerminationMessage:
    """The evidence of the cause among `endings`, of which there is at least one."""
    return evidence_of(min(endings, key=lambda ending: (_weight(ending), ending.seen_at)))


def is_conclusive(endings: Iterable[Ending]) -> bool:
    """Whether no later ending could be the cause."""
    return any(_weight(ending) == 0 for ending in endings)


def _weight(ending: Ending) -> int:
    """0 for a cause, 1 for what may be a consequence of another worker's end, 2 for what is one."""
    if ending.silence is not None:
        return 0 if ending.silence.is_stopped else 1
    is_victim = ending.last_words is not None and ending.last_words.reason is FailureReason.PEER_LOST
    return 2 if is_victim else 0


def evidence_of(ending: Ending) -> TerminationMessage:
    """What is told of one ending: the watch's verdict, the worker's last words, or how its process ended."""
    if ending.silence is not None:
        return _told(ending, FailureReason.WORKER_FROZEN, f"{_where(ending)} {_silence(ending.silence)}")
    if (words := ending.last_words) is not None:
        told = _told(ending, words.reason, words.message)
        return told.model_copy(update={"path": words.path, "tensor": words.tensor, "bucket": words.bucket})
    return _told(ending, FailureReason.WORKER_LOST, _how_it_was_lost(ending))


def _told(ending: Ending, reason: FailureReason, message: str) -> TerminationMessage:
    return TerminationMessage(
        reason=reason,
        message=message,
        rank=ending.rank,
        worker=ending.worker,
        bucket=ending.bucket,
        exit_code=ending.return_code if ending.return_code >= 0 else None,
        signal=_signal_name(ending),
        seen_at=ending.seen_at,
    )


def _where(ending: Ending) -> str:
    return f"rank {ending.rank}, worker {ending.worker} (pid {ending.pid})"


def _silence(silence: Silence) -> str:
    stopped = ", and the process is stopped by a signal" if silence.is_stopped else ""
    return f"has shown no sign of life for {silence.seconds:.0f} s{stopped}; it was killed"


def _how_it_was_lost(ending: Ending) -> str:
    name = _signal_name(ending)
    if ending.was_ours:
        how = f"closed its socket but did not exit within {EXIT_SECONDS:.0f} s, and was killed"
    elif name is not None:
        how = f"was killed by {name}"
    else:
        how = f"exited with code {ending.return_code}"
    parts = [f"{_where(ending)} {how}"]
    if ending.protocol_error is not None:
        parts.append(f"its socket: {ending.protocol_error}")
    if (line := first_error_line(ending.stderr)) is not None:
        parts.append(f"it said: {line}")
    if name == "SIGKILL":
        parts.append("the server did not send it: the kernel's out-of-memory killer, or a person")
    return "; ".join(parts)


def first_error_line(lines: Iterable[str]) -> str | None:
    """The line of a crash that says most: the first `SomethingError: text` at its margin, else the last line at all."""
    last = None
    for line in lines:
        name, colon, _ = line.partition(":")
        if colon and name.replace(".", "").isidentifier() and name.endswith(("Error", "Exception", "Interrupt")):
            return line
        last = line if line.strip() else last
    return last


def _signal_name(ending: Ending) -> str | None:
    """None where no signal ended it, or one of the server's own: that says nothing of the worker."""
    if ending.return_code >= 0 or ending.was_ours:
        return None
    try:
        return signal.Signals(-ending.return_code).name
    except ValueError:
        return f"signal {-ending.return_code}"

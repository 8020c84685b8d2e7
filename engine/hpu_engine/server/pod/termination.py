"""The last words of a pod: the termination message as a file, where a kubelet or a person finds it."""

from __future__ import annotations

import sys
from pathlib import Path

from hpu_engine.contract import TerminationMessage


class Failed(Exception):
    """The server cannot go on; `evidence` says why, and decides the exit code."""

    def __init__(self, evidence: TerminationMessage) -> None:
        super().__init__(evidence.message)
        self.evidence = evidence


def in_words(evidence: TerminationMessage) -> str:
    """One line for a person: which file, which tensor, what is wrong. A message may name the file already."""
    places = [place for place in (evidence.path, evidence.tensor) if place and place not in evidence.message]
    return ": ".join([*places, evidence.message])


def write_termination_log(path: Path, evidence: TerminationMessage) -> None:
    """Written in place: a kubelet mounts the file itself, so it cannot be replaced by renaming another over it.

    A log that cannot be written must not hide the failure it was to explain, so that is only said on stderr.
    """
    try:
        path.write_bytes(evidence.encode())
    except OSError as error:
        print(f"error: --termination-log {path} cannot be written: {error.strerror}", file=sys.stderr)  # noqa: T201

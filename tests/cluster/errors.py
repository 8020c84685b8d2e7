"""What can go wrong with the local cluster: every error says what is wrong and what to do about it."""

from __future__ import annotations


class ClusterError(Exception):
    """Base of everything this package raises on purpose; the command line prints it without a traceback."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}\n  -> {remedy}")
        self.what = what
        self.remedy = remedy


class MissingRequirement(ClusterError):
    """The machine lacks a program, a permission, a kernel feature or room on a disk."""


class BuildFailed(ClusterError):
    """A Go module did not build."""


class ComponentFailed(ClusterError):
    """A process of the cluster ended, or did not answer in time."""


class StateConflict(ClusterError):
    """The state folder belongs to something else: another size, another launcher at work, not ours at all."""


class NotRunning(ClusterError):
    """The named cluster, node or component does not run."""

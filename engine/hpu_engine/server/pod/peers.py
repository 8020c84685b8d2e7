"""The other pods of the group, as this one last heard of them. A frozen view, replaced as a whole by a newer one.

A pod alone is a group of one: without peers nothing keeps it from being ready or from leaving.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpu_engine.contract import Phase


@dataclass(frozen=True)
class PeerPod:
    """`has_open_requests`: its ranks still answer, and need every worker of the group for that."""

    pod_index: int
    phase: Phase
    has_open_requests: bool = False
    is_lost: bool = False


@dataclass(frozen=True)
class Peers:
    pods: tuple[PeerPod, ...] = ()

    @property
    def are_idle(self) -> bool:
        """Whether none of them needs this pod's workers. One that is lost never will again."""
        return not any(pod.has_open_requests and not pod.is_lost for pod in self.pods)

    @property
    def loss(self) -> str | None:
        """Why no step of this group can end any more."""
        return next((f"pod {pod.pod_index} of the group is lost" for pod in self.pods if pod.is_lost), None)

    def why_not_ready(self) -> str | None:
        """The group is in service as a whole, or not at all."""
        behind = (pod for pod in self.pods if pod.phase is not Phase.READY)
        return self.loss or next(
            (f"{pod.phase}: pod {pod.pod_index} of the group is not ready" for pod in behind), None
        )

"""What can be done to a group."""

from __future__ import annotations

from dataclasses import dataclass

from hpu_operator.domain.names import GroupId
from hpu_operator.domain.observed import Pod


@dataclass(frozen=True)
class CreateGroup:
    """Made from the record of `id.revision`."""

    id: GroupId


@dataclass(frozen=True)
class LeaveService:
    id: GroupId
    pods: tuple[Pod, ...]


@dataclass(frozen=True)
class ReturnToService:
    id: GroupId
    pods: tuple[Pod, ...]


@dataclass(frozen=True)
class DeleteGroup:
    id: GroupId
    stateful_set_name: str
    stateful_set_uid: str


Action = CreateGroup | LeaveService | ReturnToService | DeleteGroup

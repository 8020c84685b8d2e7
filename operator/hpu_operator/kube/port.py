"""What the operator needs of an API server: a seam of few methods on plain dicts, and the errors they raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from hpu_operator.kube.kinds import Kind

Live = dict[str, Any]


class KubeError(Exception):
    """The API server said no, or nothing. `status` is the HTTP status, 0 without an answer."""

    def __init__(self, action: str, status: int, message: str) -> None:
        super().__init__(f"{action}: {message}" + (f" (HTTP {status})" if status else ""))
        self.status = status
        self.message = message


class NotFound(KubeError):
    """404."""


class Conflict(KubeError):
    """409: another owner of a field, another resourceVersion or uid."""


class Refused(KubeError):
    """The request itself is wrong or forbidden; sending it again changes nothing."""


class Unavailable(KubeError):
    """No answer, too many requests, or a fault of the server; worth another try."""


class Listed(NamedTuple):
    """Objects, and the resourceVersion at which the list was true."""

    items: list[Live]
    version: int


class KubeApi(Protocol):
    """Every method raises `KubeError`."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Live | None:
        """The object, or None."""
        ...

    async def list(self, kind: Kind, namespace: str | None, **selectors: str) -> Listed:
        """All objects the kind's selector matches, in pages; `selectors` are more query parameters."""
        ...

    async def apply(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        """Server-side apply of exactly what we own."""
        ...

    async def apply_status(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        """The same through the status subresource. `NotFound` where the object is gone."""
        ...

    async def annotate(self, kind: Kind, live: Mapping[str, Any], annotations: Mapping[str, str]) -> Live:
        """Set annotations of this very version of an object. `Conflict` where it has changed or is gone."""
        ...

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete this very object, in the background; nothing happens where it is gone already."""
        ...

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Live:
        """Create; `Conflict` where the name exists."""
        ...

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Live:
        """Update guarded by the resourceVersion in `body`; `Conflict` where it is old."""
        ...

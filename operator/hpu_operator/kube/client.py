"""`KubeApi` over the official asyncio client: one generic call for every kind.

The typed calls of that client cost a model per object and cannot apply to every kind; this sends what the API server's
own documentation says, with a field manager, strict field validation, a time limit and a user agent.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from hpu_operator.domain.names import MANAGER
from hpu_operator.kube.kinds import Kind
from hpu_operator.kube.port import Conflict, KubeError, Listed, Live, NotFound, Refused, Unavailable
from hpu_operator.metrics import Metrics

_TIMEOUT = aiohttp.ClientTimeout(total=30, connect=5)
_PAGE = "500"
_CONNECTIONS = 32
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_NO_RIGHT = re.compile(r"cannot \w+ resource")
USER_AGENT = f"hpu-operator/{version('hpu-inference')}"


def in_cluster() -> bool:
    """Whether a service account's token is mounted here."""
    return _TOKEN.exists()


async def connect(metrics: Metrics) -> Client:
    """A client with the pod's service account, or outside a cluster the one of `KUBECONFIG`."""
    configuration = Configuration()
    if in_cluster():
        config.load_incluster_config(client_configuration=configuration)
    else:
        # Named here because the library looks at the variable only once, when it is imported.
        file = os.environ.get("KUBECONFIG") or None
        await config.load_kube_config(config_file=file, client_configuration=configuration)
    configuration.connection_pool_maxsize = _CONNECTIONS
    return Client(configuration, metrics)


class Client:
    """One connection pool to one API server. Close it at the end."""

    def __init__(self, configuration: Configuration, metrics: Metrics) -> None:
        self._api = ApiClient(configuration)
        self._api.user_agent = USER_AGENT
        self._metrics = metrics

    async def close(self) -> None:
        await self._api.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Live | None:
        try:
            return await self._call("GET", kind, kind.path(namespace, name))
        except NotFound:
            return None

    async def list(self, kind: Kind, namespace: str | None, **selectors: str) -> Listed:
        query = {"limit": _PAGE} | ({"labelSelector": kind.selector} if kind.selector else {}) | selectors
        found: list[Live] = []
        while True:
            page = await self._call("GET", kind, kind.path(namespace), query)
            # Items of a list do not say their kind; other objects do.
            found += [{**item, **kind.type_meta} for item in page.get("items") or []]
            token = page.get("metadata", {}).get("continue")
            if not token:
                return Listed(found, int(page["metadata"].get("resourceVersion") or 0))
            query["continue"] = token

    async def apply(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        return await self._apply(kind, manifest, None)

    async def apply_status(self, kind: Kind, manifest: Mapping[str, Any]) -> Live:
        return await self._apply(kind, manifest, "status")

    async def _apply(self, kind: Kind, manifest: Mapping[str, Any], subresource: str | None) -> Live:
        path = kind.path(manifest["metadata"]["namespace"], manifest["metadata"]["name"], subresource)
        query = {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"}
        return await self._call("PATCH", kind, path, query, manifest, content_type=_APPLY)

    async def annotate(self, kind: Kind, live: Mapping[str, Any], annotations: Mapping[str, str]) -> Live:
        metadata = live["metadata"]
        # No other object, not even a later one of the same name, ever has this version.
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"], "annotations": dict(annotations)}}
        path = kind.path(metadata["namespace"], metadata["name"])
        try:
            return await self._call("PATCH", kind, path, {"fieldManager": MANAGER}, body, content_type=_MERGE)
        except NotFound as error:
            raise Conflict(f"PATCH {path}", error.status, error.message) from error

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            await self._call("DELETE", kind, kind.path(namespace, name), None, body)
        except NotFound:
            return

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Live:
        return await self._call("POST", kind, kind.path(namespace), {"fieldManager": MANAGER}, body)

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Live:
        return await self._call("PUT", kind, kind.path(namespace, name), {"fieldManager": MANAGER}, body)

    async def _call(
        self,
        verb: str,
        kind: Kind,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
    ) -> Live:
        action = f"{verb} {path}"
        headers = {"Accept": "application/json", "Content-Type": content_type}
        began = time.monotonic()
        status = 0
        try:
            request = await self._api.param_serialize(
                verb,
                path,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._api.call_api(*request, _request_timeout=_TIMEOUT)
            data = await response.read()
            status = response.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unavailable(action, 0, f"no answer from the API server: {type(error).__name__} {error}") from error
        finally:
            self._metrics.api_call(verb, kind.plural, status, time.monotonic() - began)
        if not 200 <= status <= 299:
            raise error_of(action, status, data)
        return dict(json.loads(data))


def error_of(action: str, status: int, data: bytes) -> KubeError:
    """The server's answer as one of the port's errors."""
    try:
        message = str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        message = data.decode(errors="replace")[:500]
    if status == 404:
        return NotFound(action, status, message)
    if status == 409:
        return Conflict(action, status, message)
    # An apply whose fields do not fit the schema is answered with 500, every time.
    if status == 500 and "failed to create typed patch object" in message:
        return Refused(action, status, message)
    # The server looks up rights in a cache, which is empty for a moment after a start.
    if status in (401, 429) or status >= 500 or (status == 403 and _NO_RIGHT.search(message)):
        return Unavailable(action, status, message)
    return Refused(action, status, message)

"""The administrator's hands in a test: create, change, look, without the operator's own code in between."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from hpu_operator.kube.client import error_of
from hpu_operator.kube.kinds import Kind
from hpu_operator.kube.port import Live, NotFound, Unavailable

USER_AGENT = "control-plane-tests"


class Admin:
    """Plain requests with the administrator's kubeconfig. Raises the errors of `hpu_operator.kube.port`."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._server = cluster["server"]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=authority)),
            headers={"Authorization": f"Bearer {user['token']}", "User-Agent": USER_AGENT},
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def request(
        self,
        verb: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Live:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type}
        try:
            async with self._session.request(
                verb, self._server + path, data=data, headers=headers, params=query
            ) as response:
                raw = await response.read()
                if response.status >= 300:
                    raise error_of(f"{verb} {path}", response.status, raw)
                return dict(json.loads(raw))
        except (TimeoutError, aiohttp.ClientError) as error:
            raise Unavailable(f"{verb} {path}", 0, repr(error)) from error

    async def create(self, kind: Kind, namespace: str | None, body: Mapping[str, Any], **query: str) -> Live:
        return await self.request("POST", kind.path(namespace), body, query=query)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Live | None:
        try:
            return await self.request("GET", kind.path(namespace, name))
        except NotFound:
            return None

    async def list(self, kind: Kind, namespace: str | None, **query: str) -> list[Live]:
        answer = await self.request("GET", kind.path(namespace), query=query)
        return list(answer.get("items") or [])

    async def merge(
        self, kind: Kind, namespace: str | None, name: str, body: Mapping[str, Any], subresource: str | None = None
    ) -> Live:
        """A strategic merge for the API's own kinds, a JSON merge for custom resources."""
        custom = "." in kind.group and not kind.group.endswith("k8s.io")
        content_type = "application/merge-patch+json" if custom else "application/strategic-merge-patch+json"
        return await self.request("PATCH", kind.path(namespace, name, subresource), body, content_type=content_type)

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        grace_seconds: int | None = None,
        propagation: str | None = None,
    ) -> None:
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if propagation:
            options["propagationPolicy"] = propagation
        try:
            await self.request("DELETE", kind.path(namespace, name), options)
        except NotFound:
            await asyncio.sleep(0)

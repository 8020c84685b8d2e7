"""The few requests that the launcher and the fixtures make themselves. Small: no client library to import."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.cluster.errors import ComponentFailed

Json = dict[str, object]
_UNREACHABLE = (ConnectionError, TimeoutError, ssl.SSLError, urllib.error.URLError)


class ApiError(Exception):
    """The API server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """An API server as the user of a kubeconfig that write_kubeconfig() made."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self._server = cluster["server"]
        self._token = config["users"][0]["user"]["token"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._opener = urllib.request.build_opener(
            # No proxy of the environment: the server is on this machine.
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=authority)),
        )

    def request(self, method: str, path: str, body: Json | None = None, timeout_seconds: float = 60.0) -> Json:
        """One request. ApiError for an error status, OSError when the server cannot be reached."""
        try:
            answer: Json = json.loads(self.text(method, path, body, timeout_seconds) or "{}")
        except ValueError as error:
            raise ApiError(200, f"{method} {path} did not answer with JSON: {error}") from error
        return answer

    def text(self, method: str, path: str, body: Json | None = None, timeout_seconds: float = 60.0) -> str:
        headers: Mapping[str, str] = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": "application/merge-patch+json" if method == "PATCH" else "application/json",
            "User-Agent": "hpu-local-cluster",
        }
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + path, data=data, headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=timeout_seconds) as response:
                return str(response.read(), "utf-8")
        except urllib.error.HTTPError as error:
            raise ApiError(error.code, error.read().decode(errors="replace")[:500]) from None
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error

    def exists(self, path: str, timeout_seconds: float = 60.0) -> bool:
        """Whether a GET succeeds; an unreachable server counts as no."""
        try:
            self.text("GET", path, timeout_seconds=timeout_seconds)
        except (ApiError, OSError):
            return False
        return True


def wait_for(
    what: str,
    condition: Callable[[], bool],
    *,
    timeout_seconds: float,
    check: Callable[[], None] = lambda: None,
    interval_seconds: float = 0.1,
) -> float:
    """Wait for a condition; returns the seconds it took. `check` may raise earlier (a process died).

    A server that cannot be reached while it is asked counts as "not yet". Raises ComponentFailed when the time is up.
    """

    def holds() -> bool:
        try:
            return condition()
        except _UNREACHABLE:
            return False

    start = time.monotonic()
    while not holds():
        check()
        if time.monotonic() - start > timeout_seconds:
            raise ComponentFailed(
                f"{what}: not after {timeout_seconds:g} s", "look into the logs named below, or try again"
            )
        time.sleep(interval_seconds)
    return time.monotonic() - start

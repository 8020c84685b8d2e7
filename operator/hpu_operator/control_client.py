"""The client of the engine's control endpoint: what phase, how far, how healthy. It only reads.

Where a pod's endpoint is comes from one function, `control_url`, which tests replace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from pydantic import ValidationError

from hpu_engine.contract import CONTROL_PORT, STATE_PATH, ControlState
from hpu_operator.domain.observed import Unreachable

_TIMEOUT = aiohttp.ClientTimeout(total=3, connect=2)
_LIMIT_BYTES = 1 << 20
_CONNECTIONS = 64

ControlUrl = Callable[[Mapping[str, Any]], str | None]
"""From a pod as the API server gives it to the base URL of its control endpoint; None while it has no address."""


def control_url(pod: Mapping[str, Any]) -> str | None:
    """The control port at the pod's own address."""
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        return None
    return f"http://[{address}]:{CONTROL_PORT}" if ":" in address else f"http://{address}:{CONTROL_PORT}"


class TooLong(Exception):
    """The answer is larger than any an engine gives."""


async def _read(content: aiohttp.StreamReader) -> bytes:
    """The whole body, in however many pieces it comes. Raises `TooLong`."""
    body = bytearray()
    async for piece in content.iter_any():
        body += piece
        if len(body) > _LIMIT_BYTES:
            raise TooLong
    return bytes(body)


class ControlClient:
    """Reads control states over a pool of at most 64 connections. Close it at the end."""

    def __init__(self) -> None:
        # Without cookies and proxies from the environment: pods are asked directly.
        self._session = aiohttp.ClientSession(
            timeout=_TIMEOUT,
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def read(self, url: str) -> ControlState | Unreachable:
        """The state at `url`. Raises nothing: whatever goes wrong is an `Unreachable` that says what."""
        try:
            async with self._session.get(url + STATE_PATH, allow_redirects=False) as response:
                body = await _read(response.content)
                if response.status != 200:
                    return Unreachable(f"the control endpoint at {url} answers HTTP {response.status}")
        except TooLong:
            return Unreachable(f"the control endpoint at {url} answers more than {_LIMIT_BYTES >> 20} MiB")
        except TimeoutError:
            return Unreachable(f"the control endpoint at {url} does not answer within 3 s")
        except (aiohttp.ClientError, OSError) as error:
            return Unreachable(f"the control endpoint at {url} cannot be reached: {error}")
        try:
            return ControlState.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            return Unreachable(f"the control endpoint at {url} answers something else: {where}: {first['msg']}")

    async def close(self) -> None:
        await self._session.close()

"""The one double of the engine's control endpoint: a real HTTP server that says what a test wrote down.

It answers with the models of `hpu_engine.contract`, so it cannot say what an engine could not. All pods of a test share
one port; a pod's path is `/<namespace>/<pod>`, which is what `url_of` gives the operator in place of a pod's address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from hpu_engine.contract import (
    STATE_PATH,
    ControlState,
    ModelIdentity,
    Phase,
    PlanInput,
    RankState,
    TerminationMessage,
    WarmUp,
)


def state(
    phase: Phase,
    *,
    done: int = 0,
    total: int = 0,
    idle_seconds: float = 0.0,
    last_error: TerminationMessage | None = None,
) -> ControlState:
    """What a pod of one rank says."""
    return ControlState(
        phase=phase,
        seconds_since_progress=idle_seconds,
        uptime_seconds=1.0,
        model=ModelIdentity(served_name="scripted", path="/mnt/model"),
        plan_input=PlanInput(device="cpu", block_size=128, max_num_seqs=64, max_batched_tokens=256),
        ranks=(RankState(rank=0, phase=phase, heartbeat_age_seconds=0.0, warm_up=WarmUp(done=done, total=total)),),
        last_error=last_error,
        engine_version="scripted",
    )


class ScriptedControl:
    """Every pod says `default` until a test gives it something else; None: the connection is closed unanswered."""

    def __init__(self) -> None:
        self.default: ControlState | None = state(Phase.READY)
        self._said: dict[tuple[str, str], ControlState | None] = {}
        self.asked = 0
        self.base = ""
        app = web.Application()
        app.router.add_get("/{namespace}/{pod}" + STATE_PATH, self._answer)
        self._runner = web.AppRunner(app, access_log=None)

    async def __aenter__(self) -> ScriptedControl:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.base = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def says(self, namespace: str, pod: str, said: ControlState | None) -> None:
        self._said[namespace, pod] = said

    def url_of(self, pod: Mapping[str, Any]) -> str | None:
        """In place of `hpu_operator.control_client.control_url`."""
        metadata = pod["metadata"]
        return f"{self.base}/{metadata['namespace']}/{metadata['name']}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        place = request.match_info["namespace"], request.match_info["pod"]
        said = self._said.get(place, self.default)
        if said is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=500)
        return web.Response(text=said.model_dump_json(by_alias=True), content_type="application/json")

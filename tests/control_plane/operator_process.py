"""An operator in a process of its own, which tests can kill: NAMESPACE BASE-URL-OF-RANKS PORT IDENTITY."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hpu_operator.process import Operator
from tests.control_plane.conftest import OperatorHandle, free_port, settings_for
from tests.control_plane.scripted_control import ScriptedControl


@asynccontextmanager
async def process(
    handle: OperatorHandle, control: ScriptedControl, log: Path, identity: str = "tests"
) -> AsyncIterator[asyncio.subprocess.Process]:
    """An operator in a process of its own, which can be killed."""
    with log.open("ab") as output:
        started = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.control_plane.operator_process",
            handle.namespace,
            control.base,
            str(free_port()),
            identity,
            env=os.environ | {"KUBECONFIG": str(handle.kubeconfig)},
            stdout=output,
            stderr=output,
        )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def run(namespace: str, control: str, port: int, identity: str) -> int:
    def url_of(pod: Mapping[str, Any]) -> str:
        return f"{control}/{namespace}/{pod['metadata']['name']}"

    print(f"listen_port={port}", flush=True)
    return await Operator(settings_for(namespace, listen_port=port, identity=identity), url_of).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])))

"""An operator in a process of its own for tests that kill it: NAMESPACE BASE-URL-OF-RANKS PORT IDENTITY."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from hpu_operator.main import Operator
from tests.control_plane.conftest import settings_for


async def run(namespace: str, ranks: str, port: int, identity: str) -> int:
    def url_of(pod: Mapping[str, Any]) -> str:
        return f"{ranks}/{namespace}/{pod['metadata']['name']}"

    print(f"listen_port={port}", flush=True)
    return await Operator(settings_for(namespace, listen_port=port, identity=identity), url_of).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])))

"""Free ports on loopback, below the range of outgoing connections, so that none of those takes one by chance."""

from __future__ import annotations

import random
import socket

from tests.cluster.errors import MissingRequirement

_RANGE = range(20000, 30000)


def choose(count: int, attempts: int = 500) -> list[int]:
    """`count` different ports that nobody listens on now."""
    found: list[int] = []
    for port in random.sample(_RANGE, attempts):
        if free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise MissingRequirement(
        f"no {count} free ports between {_RANGE.start} and {_RANGE.stop} on 127.0.0.1", "end what listens there"
    )


def free(port: int) -> bool:
    with socket.socket() as probe:
        # As the servers do: a connection that is only closing does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

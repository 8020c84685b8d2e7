"""Both ports on both families of addresses: a cluster of one family alone must reach them as well."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from hpu_engine.server import listener
from tests.server.running import RunningServer, get

HAS_IPV6 = socket.has_dualstack_ipv6()


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
def test_both_ports_answer_on_both_families(shell: Path) -> None:
    with RunningServer(shell, {"step_seconds": 0.001}, host="::") as server:
        server.wait_until_ready()
        for address in ("127.0.0.1", "[::1]"):
            assert get(f"http://{address}:{server.control_port}/readyz")[0] == 200
            assert get(f"http://{address}:{server.port}/health")[0] == 200


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["", "::", "::1", "localhost"])
def test_a_host_is_bound_with_all_its_addresses_on_one_port(host: str) -> None:
    sockets = listener.bind(host, 0)
    try:
        ports = {bound.getsockname()[1] for bound in sockets}
        assert len(ports) == 1
        socket.create_connection(("::1" if host != "localhost" else host, *ports), 10.0).close()
        if host in listener.ALL_ADDRESSES:
            socket.create_connection(("127.0.0.1", *ports), 10.0).close()
    finally:
        for bound in sockets:
            bound.close()


@pytest.mark.parametrize("number", [None, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
def test_without_ipv6_all_addresses_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    """A kernel without the family, or one with the family switched off."""
    create = socket.create_server

    def refuse(address: tuple[str, int], **kw: object) -> socket.socket:
        if kw["family"] == socket.AF_INET6:
            raise OSError(number, "no IPv6 here")
        return create(address, **kw)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: number is not None)
    monkeypatch.setattr(socket, "create_server", refuse)
    (bound,) = listener.bind("::", 0)
    with bound:
        assert bound.getsockname()[0] == "0.0.0.0"


def test_a_taken_port_is_no_missing_family() -> None:
    (first,) = listener.bind("::", 0)
    with first, pytest.raises(OSError) as raised:
        listener.bind("::", first.getsockname()[1])
    assert raised.value.errno == errno.EADDRINUSE

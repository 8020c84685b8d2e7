"""Compressed bodies: what is read of them, and that one which grows costs no more than the limit of a body."""

from __future__ import annotations

import gzip
import json
import urllib.error
import urllib.request
import zlib
from pathlib import Path

import pytest

from hpu_engine.server.api.unpacking import MAX_MEMBERS, unpack
from hpu_engine.server.errors import ApiError
from tests.server.running import PATIENCE_SECONDS, RunningServer

TEXT = b'{"prompt": "abc"}'
MIB = 1 << 20


def bare_deflate(data: bytes) -> bytes:
    return zlib.compress(data)[2:-4]


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (gzip.compress(TEXT), "gzip"),
        (gzip.compress(TEXT[:5]) + gzip.compress(TEXT[5:]), "gzip"),
        (zlib.compress(TEXT), "deflate"),
        (bare_deflate(TEXT), "deflate"),
    ],
    ids=["gzip", "two members", "deflate", "bare deflate"],
)
def test_what_clients_send_is_unpacked(data: bytes, encoding: str) -> None:
    assert unpack(data, encoding, len(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"", "gzip"),
        (b"", "deflate"),
        (TEXT, "gzip"),
        (gzip.compress(TEXT)[:-1], "gzip"),
        (gzip.compress(TEXT) + b"more", "gzip"),
        (gzip.compress(b"") * (MAX_MEMBERS + 1), "gzip"),
        (zlib.compress(TEXT)[:-1], "deflate"),
        (bare_deflate(TEXT)[:-1], "deflate"),
    ],
    ids=["nothing-gzip", "nothing", "plain", "cut-gzip", "more-behind", "many-members", "cut-zlib", "cut-deflate"],
)
def test_what_is_damaged_is_refused(data: bytes, encoding: str) -> None:
    with pytest.raises(ApiError, match=f"damaged: it is not valid `{encoding}`"):
        unpack(data, encoding, 1000)


def test_no_member_may_pass_the_limit() -> None:
    with pytest.raises(ApiError, match="larger than 16 bytes"):
        unpack(gzip.compress(TEXT), "gzip", len(TEXT) - 1)
    with pytest.raises(ApiError, match="larger than 33 bytes"):
        unpack(gzip.compress(TEXT) * 2, "gzip", 2 * len(TEXT) - 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/nothing"])
def test_a_body_that_grows_costs_no_more_than_its_limit(echo: RunningServer, path: str) -> None:
    """8 GiB of blanks in 8 MB take seconds to unpack, and the event loop is everybody's."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = packer.compress(b" " * MIB) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(b" " * MIB) + packer.flush(zlib.Z_FULL_FLUSH)
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    request = urllib.request.Request(echo.url + path, head + 8191 * block, headers)
    before = cpu_seconds(echo)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)
    error = json.loads(refused.value.read())["error"]
    assert (refused.value.code, error["param"]) == ((404, None) if path == "/v1/nothing" else (400, "body"))
    urllib.request.urlopen(f"{echo.control_url}/livez", timeout=PATIENCE_SECONDS).close()
    assert cpu_seconds(echo) - before < 1.0


def cpu_seconds(server: RunningServer) -> float:
    user, system = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / 100

"""Compressed bodies, unpacked no further than a body may be long: a megabyte of gzip can stand for a gigabyte. Pure."""

from __future__ import annotations

import zlib

from hpu_engine.server.errors import body_too_large, damaged_body

GZIP, ZLIB, BARE_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
MAX_MEMBERS = 64
"""Of one body: gzip may stand behind gzip, and each costs a copy of all that follows."""


def unpack(data: bytes, encoding: str, limit_bytes: int) -> bytes:
    """`data` without its `gzip` or `deflate`. Raises `ApiError` 400 for what is damaged, cut off or too large."""
    unpacked = bytearray()
    try:
        for _ in range(MAX_MEMBERS):
            member = zlib.decompressobj(_form(data, encoding))
            unpacked += member.decompress(data, limit_bytes + 1 - len(unpacked))
            if len(unpacked) > limit_bytes:
                raise body_too_large(limit_bytes)
            if not member.eof:
                raise damaged_body(encoding)
            data = member.unused_data
            if not data:
                return bytes(unpacked)
    except zlib.error:
        pass
    raise damaged_body(encoding)


def _form(data: bytes, encoding: str) -> int:
    """Some clients send `deflate` without the header that its name demands; method 8 is the only one with one."""
    if encoding == "gzip":
        return GZIP
    return ZLIB if data[:1] and data[0] & 0xF == 8 else BARE_DEFLATE

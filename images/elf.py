"""Reads what a shared library wants and offers, and writes one that offers given symbols (ELF64, x86-64).

Layouts are those of the System V ABI and, for symbol versions, of the Linux Standard Base (generic part, chapter 10).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_VERNEED, _SHT_VERSYM = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
_DT_NULL, _DT_NEEDED = 0, 1
_SENTENCE = b" was called, but this environment is made for CPUs and has no CUDA libraries.\n"
_STB_GLOBAL, _STB_WEAK, _STT_FUNC = 1, 2, 2


class NotAnElfLibrary(Exception):
    """The file is not a 64-bit little-endian ELF file with section headers."""


@dataclass(frozen=True)
class Undefined:
    """A symbol that must come from elsewhere; `file` and `version` are empty when it names no version."""

    name: str
    file: str = ""
    version: str = ""


@dataclass(frozen=True)
class Library:
    needed: frozenset[str]
    undefined: frozenset[Undefined]
    defined: frozenset[str]

    @classmethod
    def read(cls, path: Path) -> Library:
        """Raises NotAnElfLibrary. Weak undefined symbols are left out: nobody has to provide them."""
        with path.open("rb") as file:
            head = file.read(64)
            if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:
                raise NotAnElfLibrary(f"{path}: not a 64-bit little-endian ELF file")
            (sections_at,) = struct.unpack_from("<Q", head, 40)
            size, count, _ = struct.unpack_from("<HHH", head, 58)
            file.seek(sections_at)
            table = file.read(size * count)
            sections: dict[int, tuple[bytes, bytes]] = {}  # by type: content, and the strings it refers to
            fields = [struct.unpack_from("<IIQQQQIIQQ", table, index * size) for index in range(count)]

            def content(index: int) -> bytes:
                file.seek(fields[index][4])
                return file.read(fields[index][5])

            for index, section in enumerate(fields):
                if section[1] in (_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_VERNEED, _SHT_VERSYM):
                    sections[section[1]] = (content(index), content(section[6]))
        if _SHT_DYNSYM not in sections or _SHT_DYNAMIC not in sections:
            raise NotAnElfLibrary(f"{path}: no dynamic symbols; is it stripped of its section headers?")
        versions = _versions(*sections[_SHT_VERNEED]) if _SHT_VERNEED in sections else {}
        numbers = sections[_SHT_VERSYM][0] if _SHT_VERSYM in sections else b""
        undefined, defined = set(), set()
        symbols, strings = sections[_SHT_DYNSYM]
        for index, (name_at, info, _, section_index, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", symbols)):
            name = _string(strings, name_at)
            if section_index:
                defined.add(name)
            elif name and info >> 4 != _STB_WEAK:
                (number,) = struct.unpack_from("<H", numbers, index * 2) if numbers else (0,)
                undefined.add(Undefined(name, *versions.get(number & 0x7FFF, ("", ""))))
        needed = {
            _string(sections[_SHT_DYNAMIC][1], value)
            for tag, value in struct.iter_unpack("<qQ", sections[_SHT_DYNAMIC][0])
            if tag == _DT_NEEDED
        }
        return cls(frozenset(needed), frozenset(undefined), frozenset(defined))


def _string(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _versions(verneed: bytes, strings: bytes) -> dict[int, tuple[str, str]]:
    """Version number in this library -> (file that has it, name of the version)."""
    found: dict[int, tuple[str, str]] = {}
    at = 0
    while True:
        _, count, file_at, entries_at, step = struct.unpack_from("<HHIII", verneed, at)
        entry = at + entries_at
        for _ in range(count):
            _, _, number, name_at, entry_step = struct.unpack_from("<IHHII", verneed, entry)
            found[number] = (_string(strings, file_at), _string(strings, name_at))
            entry += entry_step
        if not step:
            return found
        at += step


def _hash(name: bytes) -> int:
    value = 0
    for byte in name:
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value


def _code(soname: str) -> bytes:
    """write(2, message); exit_group(127)."""
    message = soname.encode() + _SENTENCE
    code = b"\xb8\x01\x00\x00\x00\xbf\x02\x00\x00\x00"  # mov eax, 1; mov edi, 2
    rest = b"\xba" + struct.pack("<I", len(message)) + b"\x0f\x05"  # mov edx, length; syscall
    rest += b"\xb8\xe7\x00\x00\x00\xbf\x7f\x00\x00\x00\x0f\x05\xf4"  # mov eax, 231; mov edi, 127; syscall; hlt
    return code + b"\x48\x8d\x35" + struct.pack("<i", len(rest)) + rest + message  # lea rsi, [rip + rest]


def is_stand_in(path: Path) -> bool:
    """Whether `stand_in` made it, at any time."""
    return path.stat().st_size < 1_000_000 and _SENTENCE in path.read_bytes()


def stand_in(soname: str, versioned: dict[str, set[str]], plain: set[str]) -> bytes:
    """A library called `soname` whose symbols are all functions that end the process with a message.

    `versioned` maps the name of a version to its symbols, `plain` are symbols without version.
    """
    strings = bytearray(b"\0")

    def text(value: str) -> int:
        at = len(strings)
        strings.extend(value.encode() + b"\0")
        return at

    soname_at = text(soname)
    names: list[tuple[str, int]] = [(name, 1) for name in sorted(plain)]
    for number, version in enumerate(sorted(versioned), start=2):
        names += [(name, number) for name in sorted(versioned[version])]
    verdef = bytearray()
    for number, version in enumerate(["", *sorted(versioned)], start=1):
        label = version or soname
        last = number == len(versioned) + 1
        verdef += struct.pack(
            "<HHHHIII", 1, 0 if version else 1, number, 1, _hash(label.encode()), 20, 0 if last else 28
        )
        verdef += struct.pack("<II", text(label), 0)
    text_of = [text(name) for name, _ in names]

    buckets = [0] * max(1, len(names))
    chain = [0] * (len(names) + 1)
    for index, (name, _) in enumerate(names, start=1):
        bucket = _hash(name.encode()) % len(buckets)
        chain[index], buckets[bucket] = buckets[bucket], index
    table = struct.pack(f"<II{len(buckets)}I{len(chain)}I", len(buckets), len(chain), *buckets, *chain)
    versym = struct.pack(f"<{len(names) + 1}H", 0, *(number for _, number in names))

    # One read-and-execute segment (headers, tables, code), one writable page for the dynamic section.
    at = 64 + 4 * 56
    places: dict[str, int] = {}
    symbols_size = 24 * (len(names) + 1)
    code = _code(soname)
    for part, size in (
        ("symbols", symbols_size),
        ("strings", len(strings)),
        ("hash", len(table)),
        ("versym", len(versym)),
        ("verdef", len(verdef)),
        ("code", len(code)),
    ):
        at = (at + 15) // 16 * 16
        places[part] = at
        at += size
    end = at
    dynamic_at = (end + 4095) // 4096 * 4096
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", text_at, _STB_GLOBAL << 4 | _STT_FUNC, 0, 1, places["code"], len(code))
        for text_at in text_of
    )
    dynamic = b"".join(
        struct.pack("<qQ", tag, value)
        for tag, value in (
            (14, soname_at),  # DT_SONAME
            (4, places["hash"]),  # DT_HASH
            (5, places["strings"]),  # DT_STRTAB
            (6, places["symbols"]),  # DT_SYMTAB
            (10, len(strings)),  # DT_STRSZ
            (11, 24),  # DT_SYMENT
            (0x6FFFFFF0, places["versym"]),  # DT_VERSYM
            (0x6FFFFFFC, places["verdef"]),  # DT_VERDEF
            (0x6FFFFFFD, len(versioned) + 1),  # DT_VERDEFNUM
            (_DT_NULL, 0),
        )
    )
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    segments = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, offset, offset, offset, size, size, align)
        for kind, flags, offset, size, align in (
            (1, 5, 0, end, 4096),  # PT_LOAD r-x
            (1, 6, dynamic_at, len(dynamic), 4096),  # PT_LOAD rw-
            (2, 6, dynamic_at, len(dynamic), 8),  # PT_DYNAMIC
            (0x6474E551, 6, 0, 0, 16),  # PT_GNU_STACK: no executable stack
        )
    )
    image = bytearray(dynamic_at)
    for part, content in (
        ("symbols", symbols),
        ("strings", bytes(strings)),
        ("hash", table),
        ("versym", versym),
        ("verdef", bytes(verdef)),
        ("code", code),
    ):
        image[places[part] : places[part] + len(content)] = content
    image[: 64 + 4 * 56] = header + segments
    return bytes(image) + dynamic

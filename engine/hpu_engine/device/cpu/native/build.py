"""Builds the kernels: at a start for the processor at hand (`--compile`), or ahead of it for processors with AMX.

A file's name is a digest of what it is made from. At a start that is the sources, the flags and the processor, so a
folder may be shared by machines and by versions; a folder that cannot be written costs a build at every start, no more.
Ahead (`python3 build.py FOLDER`, where no package and no torch need be) the flags name the processor. Such a library
lies beside the sources and is loaded where the processor has all that the flags let a compiler use; one of other
sources has another name, and is never found.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

COMPILER = "g++"
_COMMON = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-fPIC", "-shared")
FLAGS = (*_COMMON, "-march=native")
# Where it runs there may be no C++ library, or another one: it brings its own, and shows it to nobody.
_ALONE = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-s")
AHEAD_FLAGS = (*_COMMON, "-march=sapphirerapids", *_ALONE)
_NEEDED = """
    amx_bf16 amx_int8 amx_tile
    avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni avx512_vpopcntdq avx512bw avx512cd avx512dq avx512f
    avx512ifma avx512vbmi avx512vl avx_vnni avx avx2 f16c fma gfni pclmulqdq vpclmulqdq
    abm adx bmi1 bmi2 cx16 lahf_lm movbe pni popcnt sse4_1 sse4_2 ssse3
"""
AHEAD_NEEDS = frozenset(_NEEDED.split())
"""What -march=sapphirerapids lets a compiler use of its own accord, as /proc/cpuinfo calls it.

The flag also allows instructions for waiting, for transactions, for ciphers and for caches. No compiler uses them where
the source does not name them, and hypervisors hide some of them, so they are not asked for.
"""
BUILD_TIMEOUT_SECONDS = 300
_HERE = Path(__file__).parent

Warn = Callable[[str], None]


class NativeBuildFailed(Exception):
    """The kernels cannot be had; the text says why and what would help."""


def default_cache() -> Path:
    root = (
        os.environ.get("HPU_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpu-inference"
    )
    return Path(root) / "kernels"


def load_library(cache: Path, warn: Warn) -> ctypes.CDLL:
    """The library of this processor, from `cache` or built now. Raises NativeBuildFailed."""
    path = cache / f"{_digest()}.so"
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        pass  # Not there, or not whole: built anew.
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=cache)
    except OSError as error:
        warn(f"compiled kernels cannot be kept in {cache} ({error.strerror}); they are built at every start")
        return _built_for_once()
    with folder:
        built = Path(folder.name) / path.name
        try:
            _compile(built, FLAGS)
            built.replace(path)
        except (NativeBuildFailed, OSError) as error:
            if shutil.which(COMPILER) is None:
                raise
            warn(f"compiled kernels cannot be kept in {cache} ({error}); they are built at every start")
            return _built_for_once()
    return ctypes.CDLL(str(path))


def ahead_path() -> Path:
    """Where the library that was built ahead of these very sources lies, if there is one."""
    return _HERE / f"kernels-{_digest_of(AHEAD_FLAGS)}.so"


def load_ahead(warn: Warn) -> ctypes.CDLL | None:
    """The library that was built ahead; None without one, or on a processor that lacks what it may use."""
    path = ahead_path()
    # Before it is loaded: a library may compute as soon as that.
    if AHEAD_NEEDS - instruction_sets():
        return None
    if not path.exists():
        if others := sorted(file.name for file in _HERE.glob("kernels-*.so")):
            warn(f"{others[-1]} was built ahead of other sources, torch's kernels are used; `make setup` builds anew")
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        warn(f"kernels that were built ahead cannot be loaded, torch's are used: {error}")
        return None


def build_ahead(folder: Path) -> Path:
    """Builds the library for processors with AMX into `folder`, where it takes the place of older ones.

    Raises NativeBuildFailed, or OSError for a folder that cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ahead_path().name
    if not path.exists():
        if shutil.which(COMPILER) is None:
            raise NativeBuildFailed(f"{COMPILER} is not in PATH")
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            _compile(Path(beside) / path.name, AHEAD_FLAGS)
            (Path(beside) / path.name).replace(path)
    for old in folder.glob("kernels-*.so"):
        if old != path:
            old.unlink(missing_ok=True)
    return path


def _built_for_once() -> ctypes.CDLL:
    try:
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "kernels.so"
            _compile(built, FLAGS)
            return ctypes.CDLL(str(built))
    except OSError as error:
        raise NativeBuildFailed(f"the kernels cannot be written to a temporary folder either: {error}") from error


def _compile(to: Path, flags: Sequence[str]) -> None:
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise NativeBuildFailed(f"--compile needs {COMPILER}, which is not in PATH; install it, or leave --compile out")
    command = [compiler, *flags, *map(str, _sources()), "-o", str(to)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NativeBuildFailed(f"{COMPILER} took more than {BUILD_TIMEOUT_SECONDS} seconds") from None
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line.lower()), done.stderr.strip()[-300:])
        raise NativeBuildFailed(f"{COMPILER} failed with exit code {done.returncode}: {said[:300]}")


def _sources() -> list[Path]:
    return sorted(_HERE.glob("*.cpp"))


def _digest() -> str:
    return _digest_of((*FLAGS, platform.machine(), _processor()))


def _digest_of(names: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(names).encode())
    for file in sorted((*_sources(), *_HERE.glob("*.h"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What -march=native looks at: model and instruction sets."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(line for line in _cpuinfo() if _key(line) in wanted) or platform.processor()


def instruction_sets() -> frozenset[str]:
    """What the processor has and the kernel lets programs use; nothing where it is not x86."""
    return frozenset(name for line in _cpuinfo() if _key(line) == "flags" for name in line.partition(":")[2].split())


def _cpuinfo() -> list[str]:
    """The lines on the first processor; none where they cannot be read."""
    try:
        return Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return []


def _key(line: str) -> str:
    return line.partition(":")[0].strip()


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python3 build.py FOLDER", file=sys.stderr)  # noqa: T201
        return 2
    folder = Path(arguments[0])
    try:
        if platform.machine() != "x86_64":
            folder.mkdir(parents=True, exist_ok=True)
            said = f"kernels: none are built ahead for {platform.machine()}"
        elif (folder / ahead_path().name).exists():
            said = f"kernels: there is {build_ahead(folder).name} already"
        else:
            print("kernels: for processors with AMX, some seconds", flush=True)  # noqa: T201
            said = f"kernels: built {build_ahead(folder).name}"
    except (NativeBuildFailed, OSError) as error:
        print(f"kernels: not built ahead, the engine computes with torch's: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(said)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

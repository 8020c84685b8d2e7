"""The device plugin's own tests, in its own language: they speak the kubelet's gRPC to it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parent / "go" / "deviceplugin"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", ["vet", "test"])
def test_the_device_plugin_passes_its_own_checks(check: str) -> None:
    run = subprocess.run(["go", check, "./..."], cwd=PLUGIN, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]

"""Pushing to a registry: the reference implementation, on the loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import build as programs
from tests.cluster import modules, ports
from tests.images.__main__ import main
from tests.images.build import Image
from tests.images.errors import UnknownImage
from tests.images.registry import BadRegistry, push
from tests.images.store import Store


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of an empty registry."""
    folder = programs.build(modules.registry, modules.REGISTRY)
    address = f"127.0.0.1:{ports.choose(1)[0]}"
    configuration = tmp_path / "registry.yml"
    configuration.write_text(
        f"version: 0.1\nlog: {{accesslog: {{disabled: true}}}}\nhttp: {{addr: '{address}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: '{tmp_path / 'blobs'}'}}}}\n"
    )
    with (tmp_path / "registry.log").open("w") as log:
        process = subprocess.Popen(
            [folder / "registry", "serve", configuration], stdout=log, stderr=log, env={"PATH": os.environ["PATH"]}
        )
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/v2/", timeout=5):
                break
            time.sleep(0.1)
        else:
            pytest.fail((tmp_path / "registry.log").read_text())
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def test_a_pushed_image_can_be_pulled_as_it_was_built(
    store: Store, images: dict[str, Image], registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line, as `make images REGISTRY=...` calls it."""
    assert main(["push", f"{registry}/team/hpu", "operator"]) == 0
    image = images["operator"]
    target, _, pushed = capsys.readouterr().out.strip().partition(" ")
    reference, _, digest = pushed.partition("@")
    assert target == "operator"
    assert reference == f"{registry}/team/hpu/operator:{image.reference.rpartition(':')[2]}"
    url = f"http://{registry}/v2/team/hpu/operator/manifests/{digest}"
    accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=accept), timeout=60) as answer:
        manifest = json.load(answer)
    blobs = f"http://{registry}/v2/team/hpu/operator/blobs"
    with urllib.request.urlopen(f"{blobs}/{manifest['config']['digest']}", timeout=60) as answer:
        assert json.load(answer)["config"]["Entrypoint"] == ["/opt/app/bin/hpu-operator"]
    for layer in manifest["layers"]:
        head = urllib.request.Request(f"{blobs}/{layer['digest']}", method="HEAD")
        with urllib.request.urlopen(head, timeout=60) as answer:
            assert int(answer.headers["Content-Length"]) == layer["size"]


@pytest.mark.parametrize("prefix", ["", "http://registry.example/hpu", "registry.example/Hpu", "host:port/x", "a b"])
def test_what_is_not_a_registry_is_refused_with_an_example(store: Store, prefix: str) -> None:
    with pytest.raises(BadRegistry, match=r"HOST\[:PORT\]"):
        push(prefix, store=store)


def test_an_image_that_was_not_built_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownImage, match=r"tests\.images build operator"):
        push("127.0.0.1:1", store=Store(tmp_path))

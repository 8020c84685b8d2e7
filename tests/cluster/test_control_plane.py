"""The control plane of a test session: what a test may ask of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.api import Api, ApiError, wait_for
from tests.cluster.handle import ControlPlane
from tests.cluster.processes import MARK, end_all, identify
from tests.cluster.proxy import ApiLatency

REPOSITORY = Path(__file__).parents[2]


def test_server_reports_the_version_that_was_built(control_plane: ControlPlane) -> None:
    assert control_plane.api.request("GET", "/version")["gitVersion"] == f"v{control_plane.cluster.version}"


def test_namespace_is_made_for_one_test_with_its_service_account(control_plane: ControlPlane, namespace: str) -> None:
    assert "is-made-for-one-test" in namespace
    assert control_plane.api.exists(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")


def test_audit_log_says_who_wrote_what(control_plane: ControlPlane, namespace: str) -> None:
    config_map: dict[str, object] = {"metadata": {"name": "witness"}}
    control_plane.api.request("POST", f"/api/v1/namespaces/{namespace}/configmaps", config_map)

    def writes() -> list[tuple[str, str]]:
        events = (json.loads(line) for line in control_plane.audit_log.read_text().splitlines())
        wanted = {"namespace": namespace, "resource": "configmaps", "name": "witness"}
        return [
            (event["verb"], event["user"]["username"])
            for event in events
            if {key: event.get("objectRef", {}).get(key) for key in wanted} == wanted
        ]

    wait_for("the write in the audit log", lambda: writes() == [("create", "admin")], timeout_seconds=60)


def test_service_account_has_only_the_rights_that_it_was_given(control_plane: ControlPlane, namespace: str) -> None:
    api = Api(control_plane.service_account_kubeconfig(namespace, "worker"))
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    with pytest.raises(ApiError, match="403"):
        api.request("GET", path)
    binding = ("-n", namespace, "create", "rolebinding", "worker", "--clusterrole=view")
    control_plane.kubectl(*binding, f"--serviceaccount={namespace}:worker")
    wait_for("the binding's effect", lambda: api.exists(path), timeout_seconds=60)


def test_killed_api_server_refuses_and_comes_back_with_its_objects(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.kill("apiserver")
    assert control_plane.components()["apiserver"] is False
    with pytest.raises(OSError, match="refused"):
        control_plane.api.request("GET", "/readyz")
    control_plane.restart("apiserver")
    assert control_plane.api.exists(f"/api/v1/namespaces/{namespace}")


@pytest.mark.parametrize("component", ["etcd", "controllers", "scheduler"])
def test_killed_component_comes_back(control_plane: ControlPlane, namespace: str, component: str) -> None:
    control_plane.kill(component)
    assert control_plane.components()[component] is False
    control_plane.restart(component)
    assert control_plane.components()[component] is True
    # The controllers answer again: they make the service account of a new namespace.
    control_plane.create_namespace(f"{namespace}-2")
    control_plane.delete_namespace(f"{namespace}-2")


def test_api_latency_delays_both_directions_and_can_be_cut(
    control_plane: ControlPlane, api_latency: ApiLatency
) -> None:
    api = Api(api_latency.kubeconfig)
    assert api.exists("/readyz")
    api_latency.set_delay(0.2)
    start = time.monotonic()
    assert api.exists("/readyz")
    # A TCP answer comes from the proxy itself; TLS 1.3 and the request are a round trip each, 2 x 0.2 s.
    assert time.monotonic() - start >= 0.8
    api_latency.cut()
    assert not api.exists("/readyz")
    api_latency.restore()
    api_latency.set_delay(0.0)
    assert api.exists("/readyz")


def test_two_clusters_run_side_by_side_and_one_goes_without_the_other(control_plane: ControlPlane) -> None:
    name = f"second-{os.getpid()}"
    assert run("up", "--control-plane", "--name", name).returncode == 0
    try:
        listed = run("kubectl", "--name", name, "--", "get", "namespaces", "-o", "name")
        assert "namespace/default" in listed.stdout
        assert re.search(rf"^{name}: control plane, .* ready, [1-9]\d+ MiB", run("status").stdout, re.MULTILINE)
        assert '"level":"warn"' in run("logs", "etcd", "--name", name).stdout
        unknown = run("logs", "kubelet", "--name", name)
        assert (unknown.returncode, "its components are: apiserver" in unknown.stderr) == (1, True)
    finally:
        assert run("down", "--name", name).returncode == 0
    assert control_plane.api.exists("/readyz")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else; everybody else runs it anyway")
def test_control_plane_needs_no_root(control_plane: ControlPlane) -> None:
    # Not below root's own folder, which nobody else may enter.
    place = Path(f"/tmp/hpu-nobody-{os.getpid()}")
    for left in Path("/tmp").glob("hpu-nobody-*"):
        if identify(int(left.name.rpartition("-")[2])) is None:  # its test run was killed
            end_all(left / "clusters" / "nobody")
            shutil.rmtree(left)
    place.mkdir()
    try:
        binaries = place / "bin"
        shutil.copytree(control_plane.binaries, binaries)
        # Everything is imported before the change: nobody may not enter root's home, where Python may live.
        start = f"""
import encodings.idna, os
from pathlib import Path
from tests.cluster import build, launcher
os.setgroups([]); os.setgid(65534); os.setuid(65534)
build.cluster_binaries = lambda **_: Path({str(binaries)!r})
cluster = launcher.up(launcher.Request("nobody", 0))
print(cluster.kubeconfig.stat().st_uid, os.geteuid())
launcher.down("nobody")
"""
        environment = {
            **os.environ,
            "HPU_CLUSTERS": str(place / "clusters"),
            "HOME": str(place),
            "HPU_CACHE": str(place),
        }
        place.chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", start], env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout.split()) == (0, ["65534", "65534"]), done.stderr
    finally:
        shutil.rmtree(place)


def test_processes_of_a_cluster_are_marked(control_plane: ControlPlane) -> None:
    pid = control_plane.supervisor.process("etcd").pid
    mark = f"{MARK}={control_plane.cluster.folder}".encode()
    assert mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.cluster", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )

"""kubectl and helm on one cluster: the commands a user types, typed by a program."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import build, modules, ports
from tests.cluster.state import Cluster

Object = dict[str, Any]


class CommandFailed(Exception):
    """A command ended with an error. The text has the command and what it wrote."""


@dataclass(frozen=True)
class Kube:
    """`binaries` holds kubectl, `helm_binaries` helm; `kubeconfig` says which cluster."""

    kubeconfig: Path
    binaries: Path
    helm_binaries: Path

    @classmethod
    def of(cls, cluster: Cluster) -> Kube:
        """The tools of a local cluster; builds helm where it is not built yet."""
        return cls(cluster.kubeconfig, cluster.binaries, build.build(modules.helm, modules.HELM))

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_seconds: float = 120) -> str:
        """The standard output of `kubectl ARGUMENTS`. Raises CommandFailed."""
        return self._run(self.binaries / "kubectl", arguments, stdin, timeout_seconds)

    def helm(self, *arguments: str, timeout_seconds: float = 300) -> str:
        """The standard output of `helm ARGUMENTS`. Raises CommandFailed."""
        return self._run(self.helm_binaries / "helm", arguments, None, timeout_seconds)

    def apply(self, *manifests: Object) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(items))

    def get(self, kind: str, name: str, *, namespace: str = "default") -> Object | None:
        """The object, or None where there is none."""
        text = self.kubectl("-n", namespace, "get", kind, name, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def list(self, kinds: str, *, namespace: str = "default", selector: str = "") -> list[Object]:
        text = self.kubectl("-n", namespace, "get", kinds, "--selector", selector, "-o", "json")
        items: list[Object] = json.loads(text)["items"]
        return items

    def _run(self, program: Path, arguments: tuple[str, ...], stdin: str | None, timeout_seconds: float) -> str:
        try:
            done = subprocess.run(
                [str(program), *arguments],
                env=self.environment(),
                input=stdin,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"{program.name} {' '.join(arguments)}: no answer in {timeout_seconds:.0f} s") from None
        if done.returncode:
            raise CommandFailed(f"{program.name} {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def environment(self) -> dict[str, str]:
        """No proxy and no home of the caller: the cluster is on loopback and its state is its own."""
        home = self.kubeconfig.parent / "home"
        home.mkdir(exist_ok=True)
        return {"KUBECONFIG": str(self.kubeconfig), "HOME": str(home), "PATH": f"{self.binaries}:/usr/bin:/bin"}

    @contextlib.contextmanager
    def forwarded(self, target: str, port: int, *, namespace: str = "default") -> Iterator[str]:
        """`kubectl port-forward`: the URL on this machine's loopback while the block runs."""
        local = ports.choose(1)[0]
        command = [str(self.binaries / "kubectl"), "-n", namespace, "port-forward", target, f"{local}:{port}"]
        with subprocess.Popen(
            command, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                _wait_for_listener(process, local, target)
                yield f"http://127.0.0.1:{local}"
            finally:
                process.terminate()


def _wait_for_listener(process: subprocess.Popen[str], port: int, target: str, timeout_seconds: float = 60) -> None:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = process.stdout.read() if process.stdout else ""
            raise CommandFailed(f"kubectl port-forward {target} ended: {said.strip()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise CommandFailed(f"kubectl port-forward {target}: not listening after {timeout_seconds:.0f} s")

"""`python -m tests.cluster`: a real Kubernetes on this machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Annotated

import typer

from tests.cluster import build, launcher, modules, processes, removal, state
from tests.cluster.errors import ClusterError, NotRunning
from tests.cluster.processes import Supervisor

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
Name = Annotated[str, typer.Option("--name", help="Which cluster; several may run side by side.")]
Version = Annotated[str, typer.Option(help="Another Kubernetes version; built from source when first used.")]


@app.command()
def up(
    control_plane: Annotated[bool, typer.Option("--control-plane", help="Without nodes, and without root.")] = False,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=16, help="Nodes, each a real kubelet (root).", show_default="1")
    ] = None,
    cards: Annotated[int, typer.Option(min=0, max=64, help="Cards (habana.ai/gaudi) that each node offers.")] = 0,
    name: Name = "local",
    kubernetes_version: Version = modules.KUBERNETES_VERSION,
) -> None:
    """Bring a cluster up and say how to reach it."""
    if control_plane and (nodes or cards):
        raise typer.BadParameter("a control plane alone has no nodes and no cards", param_hint="--control-plane")
    wanted = 0 if control_plane else nodes or 1
    cluster = launcher.up(launcher.Request(name, wanted, cards, kubernetes_version))
    print(f"export KUBECONFIG={cluster.kubeconfig}")


@app.command()
def down(
    name: Name = "local",
    everything: Annotated[bool, typer.Option("--all", help="Every cluster of this checkout.")] = False,
) -> None:
    """Remove a cluster: processes, namespaces, cgroups, files. Caches stay."""
    if everything:
        removal.down_all()
        return
    start = time.monotonic()
    removed = removal.down(name)
    build.say(f"cluster {name}: " + (f"removed after {time.monotonic() - start:.1f} s" if removed else "there is none"))


@app.command()
def status() -> None:
    """List the clusters and their components; exit code 1 when something that should run does not."""
    broken = False
    if not state.names():
        print(f"no clusters in {state.root()}")
    for name in state.names():
        try:
            cluster = state.load(name)
        except ClusterError as error:
            # Another's `down` may have removed it just now.
            if state.folder_of(name).exists():
                print(f"{name}: {error}")
                broken = True
            continue
        parts = launcher.status(cluster)
        dead = [part for part, alive in parts if not alive]
        broken |= bool(dead) or not cluster.ready
        size = f"{cluster.nodes} nodes" if cluster.nodes else "control plane"
        verdict = f"not running: {', '.join(dead)}" if dead else ("ready" if cluster.ready else "not ready")
        memory = f"{processes.memory_bytes(cluster.folder) >> 20} MiB"
        print(f"{name}: {size}, Kubernetes {cluster.version}, {verdict}, {memory}; KUBECONFIG={cluster.kubeconfig}")
    raise typer.Exit(1 if broken else 0)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def kubectl(context: typer.Context, name: Name = "local") -> None:
    """Run kubectl against a cluster: python -m tests.cluster kubectl -- get nodes"""
    cluster = state.load(name)
    program = str(cluster.binaries / "kubectl")
    sys.stdout.flush()
    os.execve(program, [program, *context.args], {**os.environ, **cluster.kubectl_environment()})


@app.command()
def logs(
    component: Annotated[str, typer.Argument(help="For example apiserver, node-0-kubelet.")], name: Name = "local"
) -> None:
    """Print a component's log."""
    supervisor = Supervisor(state.load(name).folder)
    if component not in supervisor.names():
        raise NotRunning(f"{name} has no component {component}", f"its components are: {', '.join(supervisor.names())}")
    with supervisor.log(component).open(errors="replace") as log:
        for line in log:
            sys.stdout.write(line)


@app.command("build")
def build_all(kubernetes_version: Version = modules.KUBERNETES_VERSION) -> None:
    """Build everything that any size needs, into the cache."""
    start = time.monotonic()
    print(build.cluster_binaries(nodes=True, version=kubernetes_version))
    build.build(modules.helm, modules.HELM)
    build.build(modules.registry, modules.REGISTRY)
    build.say(f"build: everything is there after {time.monotonic() - start:.0f} s")


def main() -> None:
    # An `up` that is told to end (a CI job that was cancelled) removes what it made, as it does on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except ClusterError as error:
        print(f"tests.cluster: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"tests.cluster: {error}\n  -> is there room, and may this user write there?", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

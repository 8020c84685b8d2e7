"""Who may speak to the API server: one token per component, each with its real user and group, and kubeconfigs."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class User:
    """A line of the API server's token file; `name` also names the kubeconfig."""

    name: str
    user: str
    groups: tuple[str, ...]


ADMIN = User("admin", "admin", ("system:masters",))
CONTROLLERS = User("controllers", "system:kube-controller-manager", ())
SCHEDULER = User("scheduler", "system:kube-scheduler", ())
PROXY = User("kube-proxy", "system:kube-proxy", ())
# Its own account: what it may do is bound by name in dns.py.
DNS = User("coredns", "system:coredns", ())


def node_user(node: str) -> User:
    return User(node, f"system:node:{node}", ("system:nodes",))


def write_tokens(pki: Path, users: Sequence[User]) -> dict[str, str]:
    """Write `tokens.csv` (token, user, uid, groups); returns the token of each `User.name`."""
    tokens = {user.name: secrets.token_hex(16) for user in users}
    lines = [f'{tokens[user.name]},{user.user},{user.name},"{",".join(user.groups)}"' for user in users]
    path = pki / "tokens.csv"
    path.touch(mode=0o600)
    path.write_text("\n".join(lines) + "\n")
    return tokens


def write_kubeconfig(
    path: Path, *, server: str, authority: bytes, user: str, token: str, namespace: str = "default"
) -> None:
    """Write a kubeconfig that holds everything it needs, so it may be copied into a node or a container."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "local",
        "clusters": [
            {
                "name": "local",
                "cluster": {
                    "server": server,
                    "certificate-authority-data": base64.b64encode(authority).decode(),
                },
            }
        ],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": user, "namespace": namespace}}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))

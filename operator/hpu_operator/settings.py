"""What the process is told: flags, each also an environment variable `HPU_OPERATOR_<FLAG>`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """`namespaces` empty: all of them. `lease_*` and `identity` say where and as whom leadership is held."""

    namespaces: tuple[str, ...]
    engine_image_cpu: str
    listen_host: str
    listen_port: int
    lease_namespace: str
    lease_name: str
    identity: str
    workers: int = 8

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """One list and watch per scope; None is the whole cluster."""
        return self.namespaces or (None,)

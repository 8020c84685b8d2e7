"""The command line: `hpu-operator run`, `hpu-operator crd`."""

from __future__ import annotations

import asyncio
import os
import socket
from enum import StrEnum
from typing import Annotated
from uuid import uuid4

import typer

from hpu_operator.api.crd import crd_yaml
from hpu_operator.cli.logs import LogFormat, configure
from hpu_operator.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of flags in a narrow terminal, and its markup eats brackets
    help="Serve models on cards: the operator.",
)


def _variable(name: str) -> str:
    return f"HPU_OPERATOR_{name}"


@app.command()
def run(
    *,
    engine_image_cpu: Annotated[
        str, typer.Option(envvar=_variable("ENGINE_IMAGE_CPU"), help="Engine image of new revisions that name none.")
    ],
    namespace: Annotated[
        list[str] | None,
        typer.Option(envvar=_variable("NAMESPACES"), help="Namespace to serve; may be repeated. None: all."),
    ] = None,
    lease_namespace: Annotated[
        str, typer.Option(envvar=_variable("LEASE_NAMESPACE"), help="Namespace of the Lease.")
    ] = "default",
    lease_name: Annotated[
        str, typer.Option(envvar=_variable("LEASE_NAME"), help="Name of the Lease.")
    ] = "hpu-operator",
    identity: Annotated[
        str,
        typer.Option(envvar=_variable("IDENTITY"), help="Name of the pod this runs in. None: a new one per process."),
    ] = "",
    listen_host: Annotated[
        str, typer.Option(envvar=_variable("LISTEN_HOST"), help="Where health and metrics listen.")
    ] = "0.0.0.0",  # noqa: S104 - the pod's own network namespace
    listen_port: Annotated[
        int, typer.Option(envvar=_variable("LISTEN_PORT"), help="Port of /livez, /readyz and /metrics.")
    ] = 8080,
    log_format: Annotated[
        LogFormat, typer.Option(envvar=_variable("LOG_FORMAT"), help="One JSON object or one plain line per event.")
    ] = LogFormat.JSON,
    log_level: Annotated[
        str, typer.Option(envvar=_variable("LOG_LEVEL"), help="debug, info, warning, error.")
    ] = "info",
) -> None:
    """Serve HpuInference objects until told to stop."""
    from hpu_operator.process import run as run_operator

    configure(log_format, log_level)
    settings = Settings(
        namespaces=tuple(namespace or ()),
        engine_image_cpu=engine_image_cpu,
        listen_host=listen_host,
        listen_port=listen_port,
        lease_namespace=lease_namespace,
        lease_name=lease_name,
        # A name that was given belongs to one process at a time; a host's name may not.
        identity=identity or f"{socket.gethostname()}_{os.getpid()}_{uuid4().hex[:8]}",
    )
    raise typer.Exit(asyncio.run(run_operator(settings)))


class Page(StrEnum):
    FIELDS = "fields"
    REASONS = "reasons"


@app.command()
def reference(page: Annotated[Page, typer.Argument(help="Which page.")]) -> None:
    """Print a page of the reference: the fields of the API, or the reasons in status."""
    from hpu_operator.api.reference import field_reference, reason_catalogue

    typer.echo(field_reference() if page is Page.FIELDS else reason_catalogue(), nl=False)


@app.command()
def crd() -> None:
    """Print the CustomResourceDefinition."""
    typer.echo(crd_yaml(), nl=False)

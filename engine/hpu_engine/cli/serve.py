"""`hpu-engine serve`: the settings as flags. The list of flags is made from the settings, not kept beside them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from hpu_engine.contract import EXIT_CODES, FailureReason, TerminationMessage
from hpu_engine.settings import ENV_PREFIX, ServeSettings, SettingsError, flag_of, load_settings

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

_METAVARS = {int: "INTEGER", float: "SECONDS", str: "TEXT", Path: "PATH"}


def _flag(name: str) -> inspect.Parameter:
    """The flag of a setting, as text: the settings convert and check it, and can say where a wrong value came from.

    None stands for "not given", so that the environment and the file have their turn.
    """
    field = ServeSettings.model_fields[name]
    if field.annotation is bool:
        switch = typer.Option(f"{flag_of(name)}/--no-{flag_of(name)[2:]}", help=field.description, show_default=False)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[bool | None, switch]
        )
    if get_origin(field.annotation) is Literal:
        metavar = "|".join(get_args(field.annotation))
    else:
        kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not NoneType]
        metavar = _METAVARS[kinds[0]]
    text = field.description or ""
    if not field.is_required() and field.default is not None:
        text += f" [default: {field.default}]"
    option = typer.Option(flag_of(name), help=text, metavar=metavar, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _with_flags_of_the_settings(function: Callable[..., None]) -> Callable[..., None]:
    config = typer.Option("--config", help="YAML file with any of these settings.", metavar="PATH", show_default=False)
    parameters = [_flag(name) for name in ServeSettings.model_fields]
    parameters.append(
        inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, config]
        )
    )
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


@app.command(
    short_help="Serve a model through an OpenAI-compatible API.",
    help=f"Serve a model through an OpenAI-compatible API. Every flag is also a variable ({ENV_PREFIX}MODEL for "
    "--model) and a key of the --config file; a flag wins over a variable, a variable over the file.",
)
@_with_flags_of_the_settings
def serve(config: Path | None = None, **flags: Any) -> None:
    try:
        settings = load_settings(flags, config)
    except SettingsError as error:
        sys.exit(_refuse(str(error), flags.get("termination_log")))
    from hpu_engine.server.run import run

    sys.exit(run(settings))


def _refuse(message: str, termination_log: str | None) -> int:
    """Settings that are wrong leave the same evidence as any other failure."""
    from hpu_engine.server.termination import write_termination_log

    typer.echo(f"error: {message}", err=True)
    path = termination_log or os.environ.get(f"{ENV_PREFIX}TERMINATION_LOG")
    if path:
        write_termination_log(Path(path), TerminationMessage(reason=FailureReason.USAGE, message=message))
    return EXIT_CODES[FailureReason.USAGE]

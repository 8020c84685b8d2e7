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
from hpu_engine.settings.serve import ENV_PREFIX, ServeSettings, SettingsError, flag_of, load_settings

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)

_METAVARS = {int: "INTEGER", float: "SECONDS", str: "TEXT", Path: "PATH"}


def _flag(name: str) -> inspect.Parameter:
    """The flag of a setting, as text: the settings convert and check it, and can say where a wrong value came from.

    None stands for "not given", so that the environment and the file have their turn.
    """
    field = ServeSettings.model_fields[name]
    text = field.description or ""
    if not field.is_required() and field.default not in (None, ()):
        text += f" Default: {_as_written(field.default)}."
    if field.annotation is bool:
        switch = typer.Option(f"{flag_of(name)}/--no-{flag_of(name)[2:]}", help=text, show_default=False)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[bool | None, switch]
        )
    if get_origin(field.annotation) is Literal:
        metavar = "|".join(get_args(field.annotation))
    else:
        kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not NoneType]
        metavar = _METAVARS[kinds[0]]
    option = typer.Option(flag_of(name), help=text, metavar=metavar, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _as_written(value: object) -> str:
    """A default as the flag's value: 30 and not 30.0, on and not True."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


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
    if objection := _objection_to_the_budget(settings):
        sys.exit(_refuse(objection, settings.termination_log))
    from hpu_engine.server.run import run

    sys.exit(run(settings))


def _objection_to_the_budget(settings: ServeSettings) -> str | None:
    """What planning would say of a budget that was asked for, in this command's flags.

    The model is not read yet: where its length is not given either, it is taken as endless, which objects to less.
    """
    if settings.max_num_batched_tokens is None:
        return None
    from hpu_engine.planning.memory.budget import budget_violations
    from hpu_engine.planning.shapes.limits import StepLimits
    from hpu_engine.planning.violations import in_flags

    limits = StepLimits(
        max_model_len=settings.max_model_len or sys.maxsize,
        max_num_seqs=settings.max_num_seqs,
        max_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
    )
    return in_flags(budget_violations(limits)) or None


def _refuse(message: str, termination_log: str | Path | None) -> int:
    """Settings that are wrong leave the same evidence as any other failure."""
    from hpu_engine.server.pod.termination import write_termination_log

    typer.echo(f"error: {message}", err=True)
    path = termination_log or os.environ.get(f"{ENV_PREFIX}TERMINATION_LOG")
    if path:
        write_termination_log(Path(path), TerminationMessage(reason=FailureReason.USAGE, message=message))
    return EXIT_CODES[FailureReason.USAGE]

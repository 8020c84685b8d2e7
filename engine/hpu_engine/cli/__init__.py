"""`hpu-engine`: one module of this package per command, imported when the command is called. No torch here.

A module `name.py` that has an `app` (a `typer.Typer` with one command, or a group of them) is the command `name`.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import hpu_engine


class CommandPerModule(TyperGroup):
    """Finds commands by file name, so that a command's imports are paid for by that command alone."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        app: typer.Typer = importlib.import_module(f"{__name__}.{cmd_name}").app
        command = typer.main.get_command(app)
        command.name = cmd_name
        return command


def _show_version(value: bool) -> None:
    if value:
        typer.echo(hpu_engine.__version__)
        raise typer.Exit


main = typer.Typer(
    name="hpu-engine",
    cls=CommandPerModule,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # its tables cut the names of flags in a narrow terminal, and its markup eats brackets
)


@main.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Serve a language model on Intel Gaudi, or on this machine's processor."""

"""`hpu-engine plan`: what a deployment costs, before a card is taken."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer

from hpu_engine.contract import ExitCode
from hpu_engine.planning.cards import BLOCK_SIZE, MAX_NUM_SEQS, RECIPES

if TYPE_CHECKING:
    from hpu_engine.planning.plan import Plan
    from hpu_engine.planning.shapes.trace import Lengths

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)

TRACE_LIMIT_BYTES = 256 * 1024 * 1024


class DeviceChoice(StrEnum):
    HPU = "hpu"
    CPU = "cpu"


class CardChoice(StrEnum):
    GAUDI2 = "gaudi2"
    GAUDI3 = "gaudi3"


class Kernels(StrEnum):
    AUTO = "auto"
    TORCH = "torch"


class Format(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FP8 = "fp8"


class DType(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FP8 = "fp8"


@app.command(short_help="Does it fit, on how many cards, how long does it warm up?")
def plan(
    *,
    model: Annotated[Path | None, typer.Option(help="Directory of the checkpoint.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json, where there is no checkpoint.")] = None,
    device: Annotated[DeviceChoice, typer.Option(help="hpu, or cpu: what this machine would do.")] = DeviceChoice.HPU,
    card: Annotated[CardChoice, typer.Option(help="Type of Gaudi, for --device hpu.")] = CardChoice.GAUDI2,
    calibration: Annotated[Path | None, typer.Option(help="Measured constants of the card, JSON.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Cards of one rank.")] = 1,
    data_parallel_size: Annotated[int, typer.Option(help="Ranks of the group.")] = 1,
    expert_parallel_size: Annotated[int, typer.Option(help="1, or all cards of the group.")] = 1,
    cards_per_pod: Annotated[int | None, typer.Option(help="Default: a whole server, at most the group.")] = None,
    cards: Annotated[int | None, typer.Option(min=1, max=1024, help="Recommend a layout of so many.")] = None,
    dtype: Annotated[
        DType, typer.Option(help="Weights. auto: the checkpoint's, bfloat16 or fp8 on Gaudi.")
    ] = DType.AUTO,
    kv_cache: Annotated[Format | None, typer.Option(help="Default: bfloat16, or as the weights.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Default: what the model allows.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests in a step.")] = MAX_NUM_SEQS,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Budget: tokens in a step.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = BLOCK_SIZE,
    kv_cache_memory: Annotated[int | None, typer.Option(help="Bytes. Default: 512 MiB on cpu, else the rest.")] = None,
    num_kv_blocks: Annotated[int | None, typer.Option(help="Overrides --kv-cache-memory.")] = None,
    recipes: Annotated[int, typer.Option(min=1, max=20000, help="Most recipes to compile.")] = RECIPES,
    exact: Annotated[bool, typer.Option(help="As of `serve` (cpu).")] = False,
    force_buckets: Annotated[bool, typer.Option(help="As of `serve` (cpu).")] = False,
    kernels: Annotated[Kernels, typer.Option(help="As of `serve` (cpu).")] = Kernels.AUTO,
    compile: Annotated[bool, typer.Option(help="As of `serve` (cpu).")] = False,  # noqa: A002 - the flag's name
    trace: Annotated[Path | None, typer.Option(help="[[prompt, output], ...] in tokens: fit buckets to it.")] = None,
    fp8_dispatch: Annotated[bool, typer.Option(help="Send tokens to experts in fp8.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw padding and buckets (.png, .svg, .pdf).")] = None,
) -> None:
    """Print a table to read in ten seconds, then the details. Exits 0 when it fits, 4 when it does not."""
    from hpu_engine.device.cpu.processor import cpu_card
    from hpu_engine.planning import ModelConfigError, read_model_description
    from hpu_engine.planning.cards import CARDS, CalibrationError, read_calibration
    from hpu_engine.planning.layout import Layout
    from hpu_engine.planning.plan import make_plan
    from hpu_engine.planning.recommend import recommend, ways_out
    from hpu_engine.planning.report import plan_document, plan_text
    from hpu_engine.planning.settle import Specification
    from hpu_engine.planning.shapes.choice import TooFewRecipes
    from hpu_engine.planning.violations import PlanError, in_flags

    if (model is None) == (config is None):
        _fail(ExitCode.USAGE, "give --model DIR or --config config.json, one of them")
    try:
        kind = cpu_card() if device is DeviceChoice.CPU else CARDS[card.value]
        request = Specification(
            model=read_model_description(cast(Path, model or config)),
            card=kind if calibration is None else read_calibration(calibration).apply(kind),
            layout=Layout(tensor_parallel_size, data_parallel_size, expert_parallel_size, cards_per_pod),
            dtype=dtype.value,
            kv_format=None if kv_cache is None else kv_cache.value,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_memory_bytes=kv_cache_memory,
            recipes=recipes,
            trace=None if trace is None else _read_trace(trace),
            fp8_dispatch=fp8_dispatch,
            exact=exact,
            force_buckets=force_buckets,
            kernels=kernels.value,
            compile=compile,
        )
        made = make_plan(request)
        advice = None if cards is None else recommend(request, cards)
        possible = () if made.fits else ways_out(request)
        if plot is not None:
            _draw(made, plot)
    except ModelConfigError as error:
        _fail(ExitCode.MODEL, str(error))
    except PlanError as error:
        _fail(ExitCode.USAGE, in_flags(error.violations))
    except (CalibrationError, TooFewRecipes, InputError) as error:
        _fail(ExitCode.USAGE, str(error))
    if as_json:
        document = plan_document(made, ways_out=possible, recommendation=advice)
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo(plan_text(made, ways_out=possible, recommendation=advice), nl=False)
    if not made.fits:
        sys.exit(ExitCode.RESOURCES)


class InputError(ValueError):
    """A file that was named cannot be used. Says which and why."""


def _draw(made: Plan, file: Path) -> None:
    from hpu_engine.cli._plan_plot import PlotError, draw_plan

    try:
        draw_plan(made, file)
    except PlotError as error:
        raise InputError(str(error)) from error


def _read_trace(file: Path) -> list[Lengths]:
    from hpu_engine.planning.shapes.trace import Lengths

    try:
        if file.stat().st_size > TRACE_LIMIT_BYTES:
            raise InputError(f"{file}: larger than {TRACE_LIMIT_BYTES} bytes")
        entries = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{file}: a list of [prompt, output] pairs is needed")
    requests = []
    for index, entry in enumerate(entries):
        match entry:
            case [int(prompt), int(output)] if prompt > 0 and output > 0:
                requests.append(Lengths(prompt, output))
            case _:
                raise InputError(f"{file}: entry {index}: two positive whole numbers are needed, [prompt, output]")
    return requests


def _fail(code: ExitCode, message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    sys.exit(code)

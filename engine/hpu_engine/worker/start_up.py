"""Brings up one rank in this process: description, memory, weights, KV pool, warm-up, one real token.

The worker process and the in-process `LLM` share it. Every refusal is a `StartUpError` with the reason, the file and
the tensor that a termination message carries.
"""

from __future__ import annotations

import sys
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path

import torch

from hpu_engine.contract import FailureReason, Phase
from hpu_engine.device.base import Device
from hpu_engine.device.cpu.device import CpuDevice
from hpu_engine.device.cpu.native.build import NativeBuildFailed, default_cache, load_ahead, load_library
from hpu_engine.device.cpu.native.ops import NativeOps
from hpu_engine.device.cpu.native.tile_ops import TileOps, has_tiles
from hpu_engine.device.cpu.processor import read_processor
from hpu_engine.model.builder import build_transformer
from hpu_engine.model.runner import ModelRunner
from hpu_engine.model.weights.checking import refuse_quantised
from hpu_engine.model.weights.errors import WeightsError
from hpu_engine.planning import ModelConfigError, ModelConfigErrorKind, ModelDescription, read_model_description
from hpu_engine.planning.cards import CARDS, Processor
from hpu_engine.planning.memory.plan import MemoryPlan
from hpu_engine.planning.model.parameters import parameter_count
from hpu_engine.planning.settle import Settled, settle
from hpu_engine.planning.shapes.choice import TooFewRecipes
from hpu_engine.planning.violations import PlanError, in_flags
from hpu_engine.scheduling.kv_blocks import BlockPool
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Limits, Scheduler
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.step.loop import StepLoop
from hpu_engine.step.shapes import ShapeMap
from hpu_engine.wire.messages import Loaded, Progress, Submit
from hpu_engine.worker.warm_up import OnProgress, run_buckets, run_shapes

_REASONS = {
    ModelConfigErrorKind.NOT_FOUND: FailureReason.MODEL_NOT_FOUND,
    ModelConfigErrorKind.BROKEN: FailureReason.MODEL_BROKEN,
    ModelConfigErrorKind.UNSUPPORTED: FailureReason.MODEL_UNSUPPORTED,
}


class StartUpError(Exception):
    """Why a rank cannot serve."""

    def __init__(
        self, reason: FailureReason, message: str, *, path: str | None = None, tensor: str | None = None
    ) -> None:
        self.reason = reason
        self.message = message
        self.path = path
        self.tensor = tensor
        super().__init__(": ".join(part for part in (path, tensor, message) if part))


@dataclass(frozen=True, slots=True)
class Rank:
    """A loaded rank. `warm_up` before the first real request."""

    loop: StepLoop
    runner: ModelRunner
    device: Device
    loaded: Loaded
    settled: Settled

    def warm_up(self, on_progress: OnProgress) -> None:
        """Run every bucket, or the shapes of the device, largest first; then one real token through the whole loop."""
        buckets = self.runner.shapes.buckets
        if buckets is not None:
            total = run_buckets(self.runner, buckets, on_progress)
        else:
            limits = self.settled.limits
            shapes = self.device.warm_up_shapes(
                max_batched_tokens=limits.max_batched_tokens,
                max_num_seqs=limits.max_num_seqs,
                max_len=limits.max_model_len,
            )
            total = run_shapes(self.runner, list(shapes), on_progress)
        on_progress(Progress(phase=Phase.WARMING_UP, done=total, total=total, current="first token"))
        self._produce_one_token()
        self.runner.first_seen.end_warm_up()

    def _produce_one_token(self) -> None:
        refused = self.loop.submit(
            Submit(
                request_id="first-token", prompt_token_ids=(0,), params=SamplingParams(max_tokens=1, temperature=0.0)
            )
        )
        if refused is not None:
            raise StartUpError(FailureReason.INTERNAL, f"the first token was refused: {refused.message}")
        result = self.loop.step()
        if not result.outputs:
            why = result.rejected[0].message if result.rejected else "no output"
            raise StartUpError(FailureReason.MODEL_BROKEN, f"the model gives no token: {why}")


def open_rank(config: EngineConfig, on_progress: OnProgress) -> Rank:
    """Load everything `config` names. Raises StartUpError."""
    directory = Path(config.model)
    description = _describe(directory)
    settled, device = _settle(config, description, on_progress)
    limits = settled.limits
    _check_memory(settled.memory, device, config)

    def on_bytes(done: int, total: int) -> None:
        on_progress(Progress(phase=Phase.LOADING, done=done, total=total))

    try:
        transformer = build_transformer(
            directory,
            description,
            device,
            dtype=getattr(torch, settled.compute_dtype),
            max_len=settled.max_model_len,
            on_bytes=on_bytes,
        )
    except WeightsError as error:
        raise StartUpError(error.reason, error.message, path=error.path, tensor=error.tensor) from error
    num_blocks = settled.memory.kv_blocks
    caches = device.new_kv_cache(
        layers=description.layers,
        pages=num_blocks + limits.scratch_blocks,
        kv_heads=transformer.attention_shape.kv_heads,
        block_size=limits.block_size,
        head_dim=description.head_dim,
        dtype=getattr(torch, settled.kv_format),
    )
    runner = ModelRunner(transformer, caches, device, ShapeMap(limits.block_size, settled.buckets))
    scheduler = Scheduler(
        Limits(limits.max_batched_tokens, limits.max_num_seqs, settled.max_model_len),
        BlockPool(num_blocks, limits.block_size),
        cache_seed=str(directory),
    )
    loaded = Loaded(
        max_model_len=settled.max_model_len,
        num_kv_blocks=num_blocks,
        block_size=limits.block_size,
        max_batched_tokens=limits.max_batched_tokens,
        architecture=description.architecture.value,
        dtype=settled.kv_format,
        kernels=settled.kernels,
        parameters=parameter_count(description),
        settled_digest=settled.digest,
    )
    return Rank(StepLoop(scheduler, runner), runner, device, loaded, settled)


def _describe(directory: Path) -> ModelDescription:
    try:
        description = read_model_description(directory)
    except ModelConfigError as error:
        message = f"{error.key}: {error.reason}" if error.key else error.reason
        raise StartUpError(_REASONS[error.kind], message, path=error.path) from error
    if description.quantization is not None:
        try:
            refuse_quantised(directory, description)
        except WeightsError as error:
            raise StartUpError(error.reason, error.message, path=error.path, tensor=error.tensor) from error
    return description


def _settle(config: EngineConfig, description: ModelDescription, on_progress: OnProgress) -> tuple[Settled, Device]:
    """What the configuration comes to, and the device that computes it. Raises StartUpError.

    It is settled as if the kernels could be loaded, and anew where they cannot.
    """
    if config.device != "cpu":
        raise StartUpError(FailureReason.USAGE, f"device {config.device!r} is not supported; supported is cpu")
    processor = read_processor()
    settled = _settled_on(processor.model_copy(update={"kernels_ahead": processor.tiles}), config, description)
    native: NativeOps | None = None
    if settled.kernels != "torch":
        library = _compiled_library(config, on_progress) if config.compile else load_ahead(_warn)
        if settled.kernels == "tiles" and (library is None or not has_tiles(library)):
            lacking = {"tiles" if config.compile else "kernels_ahead": False}
            settled = _settled_on(processor.model_copy(update=lacking), config, description)
        if library is not None and settled.kernels != "torch":
            native = TileOps(library) if settled.kernels == "tiles" else NativeOps(library)
    return settled, CpuDevice(exact=config.exact, static_shapes=config.force_buckets, native=native)


def _settled_on(processor: Processor, config: EngineConfig, description: ModelDescription) -> Settled:
    card = CARDS["cpu"].model_copy(update={"processor": processor})
    try:
        settled = settle(config.specification(description, card))
        settled.buckets  # noqa: B018 - too few recipes are refused here
    except (PlanError, TooFewRecipes) as error:
        message = in_flags(error.violations) if isinstance(error, PlanError) else str(error)
        raise StartUpError(FailureReason.USAGE, message) from error
    if settled.violations:
        raise StartUpError(FailureReason.USAGE, in_flags(settled.violations))
    return settled


def _compiled_library(config: EngineConfig, on_progress: OnProgress) -> CDLL:
    on_progress(Progress(phase=Phase.STARTING, current="compiling kernels"))
    try:
        return load_library(Path(config.compile_cache) if config.compile_cache else default_cache(), _warn)
    except NativeBuildFailed as error:
        raise StartUpError(FailureReason.USAGE, str(error)) from error


def _warn(message: str) -> None:
    # A worker's standard error becomes the server's log.
    print(f"warning: {message}", file=sys.stderr)  # noqa: T201


def _check_memory(planned: MemoryPlan, device: Device, config: EngineConfig) -> None:
    available = device.available_memory_bytes()
    if planned.needed_bytes > available:
        raise StartUpError(
            FailureReason.INSUFFICIENT_MEMORY,
            f"{planned.needed_bytes} bytes are planned ({planned.weight_bytes} weights, {planned.kv_bytes} KV cache, "
            f"{planned.activations.bytes} largest step, {planned.reserve_bytes} process), {available} are available",
            path=config.model,
        )

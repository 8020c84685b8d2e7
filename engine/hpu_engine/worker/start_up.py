"""Brings up one rank in this process: description, memory, weights, KV pool, warm-up, one real token.

The worker process and the in-process `LLM` share it. Every refusal is a `StartUpError` with the reason, the file and
the tensor that a termination message carries.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from hpu_engine.contract import FailureReason, Phase
from hpu_engine.device.base import Device, UnsupportedOnDevice
from hpu_engine.device.cpu.device import CpuDevice
from hpu_engine.device.cpu.native.build import NativeBuildFailed, default_cache, load_ahead, load_library
from hpu_engine.device.cpu.native.ops import HEAD_MULTIPLE, NativeOps
from hpu_engine.device.cpu.native.tile_ops import TileOps, has_tiles, takes_shapes
from hpu_engine.model.builder import build_transformer
from hpu_engine.model.runner import ModelRunner
from hpu_engine.model.weights.checking import refuse_quantised
from hpu_engine.model.weights.errors import WeightsError
from hpu_engine.planning.cards import CARDS
from hpu_engine.planning.memory.weights import WeightFormat
from hpu_engine.planning.model.description import (
    ModelConfigError,
    ModelConfigErrorKind,
    ModelDescription,
    read_model_description,
)
from hpu_engine.planning.model.parameters import parameter_count
from hpu_engine.planning.plan import PlanRequest, planned_buckets
from hpu_engine.planning.shapes.buckets import BucketSet
from hpu_engine.planning.shapes.limits import StepLimits
from hpu_engine.scheduling.kv_blocks import BlockPool
from hpu_engine.scheduling.sampling_params import SamplingParams
from hpu_engine.scheduling.scheduler import Limits, Scheduler
from hpu_engine.settings.engine import EngineConfig
from hpu_engine.step.loop import StepLoop
from hpu_engine.step.shapes import ShapeMap
from hpu_engine.wire.messages import Loaded, Progress, Submit
from hpu_engine.worker.warm_up import OnProgress, run_buckets, run_shapes

DEFAULT_KV_CACHE_BYTES = 512 * 1024 * 1024
PROCESS_RESERVE_BYTES = 256 * 1024 * 1024
"""What a step's activations and the allocator take beside weights and KV on the CPU."""

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
    max_num_seqs: int

    def warm_up(self, on_progress: OnProgress) -> None:
        """Run every bucket, or the shapes of the device, largest first; then one real token through the whole loop."""
        buckets = self.runner.shapes.buckets
        if buckets is not None:
            total = run_buckets(self.runner, buckets, on_progress)
        else:
            shapes = self.device.warm_up_shapes(
                max_batched_tokens=self.loaded.max_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                max_len=min(self.loaded.max_model_len, self.loaded.num_kv_blocks * self.loaded.block_size),
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
    device = _open_device(config, description, on_progress)
    dtype = _compute_dtype(config, description, device)
    max_model_len = _max_model_len(config, description)
    operand_dtype = device.operand_dtype(dtype)
    num_blocks = _num_kv_blocks(config, description, operand_dtype)
    _check_memory(description, device, operand_dtype, num_blocks, config)

    def on_bytes(done: int, total: int) -> None:
        on_progress(Progress(phase=Phase.LOADING, done=done, total=total))

    try:
        transformer = build_transformer(
            directory, description, device, dtype=dtype, max_len=max_model_len, on_bytes=on_bytes
        )
    except WeightsError as error:
        raise StartUpError(error.reason, error.message, path=error.path, tensor=error.tensor) from error
    limits = Limits(
        max_batched_tokens=config.max_num_batched_tokens or device.default_max_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
    )
    scheduler = Scheduler(limits, BlockPool(num_blocks, config.block_size), cache_seed=str(directory))
    loaded = Loaded(
        max_model_len=max_model_len,
        num_kv_blocks=num_blocks,
        block_size=config.block_size,
        max_batched_tokens=limits.max_batched_tokens,
        architecture=description.architecture.value,
        dtype=str(operand_dtype).removeprefix("torch."),
        kernels=device.kernels,
        parameters=parameter_count(description),
    )
    buckets = bucket_set(config, description, limits, num_blocks) if config.force_buckets else None
    caches = device.new_kv_cache(
        layers=description.layers,
        pages=num_blocks + (buckets.limits.scratch_blocks if buckets else 1),
        kv_heads=transformer.attention_shape.kv_heads,
        block_size=config.block_size,
        head_dim=description.head_dim,
        dtype=operand_dtype,
    )
    runner = ModelRunner(transformer, caches, device, ShapeMap(config.block_size, buckets))
    return Rank(StepLoop(scheduler, runner), runner, device, loaded, config.max_num_seqs)


def bucket_set(config: EngineConfig, description: ModelDescription, limits: Limits, num_blocks: int) -> BucketSet:
    """The buckets that `hpu-engine plan --card cpu` prints for this configuration.

    A rank also runs what a plan refuses, such as a pool below the model length: no row is longer than the pool then.
    """
    request = PlanRequest(
        model=description,
        card=CARDS["cpu"],
        weight_format=None if config.dtype == "auto" else cast(WeightFormat, config.dtype),
        block_size=config.block_size,
    )
    step_limits = StepLimits(
        max_model_len=min(limits.max_model_len, num_blocks * config.block_size),
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        block_size=config.block_size,
        kv_blocks=num_blocks,
    )
    return planned_buckets(request, step_limits)


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


def _open_device(config: EngineConfig, description: ModelDescription, on_progress: OnProgress) -> Device:
    if config.device != "cpu":
        raise StartUpError(FailureReason.USAGE, f"device {config.device!r} is not supported; supported is cpu")
    if config.compile:
        native: NativeOps | None = _compiled_kernels(config, description, on_progress)
    else:
        native = _kernels_built_ahead(config, description) if config.kernels == "auto" else None
    return CpuDevice(exact=config.exact, static_shapes=config.force_buckets, native=native)


def _compiled_kernels(config: EngineConfig, description: ModelDescription, on_progress: OnProgress) -> NativeOps:
    if config.kernels == "torch":
        raise StartUpError(
            FailureReason.USAGE,
            "--compile builds the engine's own kernels, and --kernels torch forbids them; leave one of the two out",
        )
    if description.head_dim % HEAD_MULTIPLE:
        raise StartUpError(
            FailureReason.USAGE,
            f"--compile takes models with heads of a multiple of {HEAD_MULTIPLE} elements; this one's have "
            f"{description.head_dim}",
        )
    on_progress(Progress(phase=Phase.STARTING, current="compiling kernels"))
    try:
        library = load_library(Path(config.compile_cache) if config.compile_cache else default_cache(), _warn)
    except NativeBuildFailed as error:
        raise StartUpError(FailureReason.USAGE, str(error)) from error
    return TileOps(library) if _suits_tiles(config, description) and has_tiles(library) else NativeOps(library)


def _kernels_built_ahead(config: EngineConfig, description: ModelDescription) -> TileOps | None:
    """None where torch's operators are as good: everywhere but on tiles."""
    if not _suits_tiles(config, description):
        return None
    library = load_ahead(_warn)
    return TileOps(library) if library is not None and has_tiles(library) else None


def _suits_tiles(config: EngineConfig, description: ModelDescription) -> bool:
    # What is exact, and what is padded, has its attention from torch, in one type with the linears.
    if config.exact or config.force_buckets or _requested_dtype(config, description) != "bfloat16":
        return False
    return takes_shapes(description.head_dim, config.block_size)


def _warn(message: str) -> None:
    # A worker's standard error becomes the server's log.
    print(f"warning: {message}", file=sys.stderr)  # noqa: T201


def _compute_dtype(config: EngineConfig, description: ModelDescription, device: Device) -> torch.dtype:
    try:
        return device.compute_dtype(_requested_dtype(config, description))
    except UnsupportedOnDevice as error:
        raise StartUpError(FailureReason.USAGE, str(error)) from error


def _requested_dtype(config: EngineConfig, description: ModelDescription) -> str:
    """`auto` is the checkpoint's own type, and float32 for float16: bfloat16 would lose its digits."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if description.dtype == "float16" else description.dtype


def _max_model_len(config: EngineConfig, description: ModelDescription) -> int:
    asked = config.max_model_len
    if asked is None:
        return description.max_positions
    if not 1 < asked <= description.max_positions:
        raise StartUpError(
            FailureReason.USAGE, f"max-model-len {asked} is outside of 2..{description.max_positions} of this model"
        )
    return asked


def _num_kv_blocks(config: EngineConfig, description: ModelDescription, dtype: torch.dtype) -> int:
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks < 1:
            raise StartUpError(FailureReason.USAGE, f"num-kv-blocks is {config.num_kv_blocks}; at least 1 is needed")
        return _with_room(config.num_kv_blocks, config)
    memory = config.kv_cache_memory_bytes or DEFAULT_KV_CACHE_BYTES
    block_bytes = _kv_block_bytes(description, config.block_size, dtype)
    blocks = memory // block_bytes - 1
    if blocks < 1:
        raise StartUpError(
            FailureReason.INSUFFICIENT_MEMORY,
            f"kv-cache-memory of {memory} bytes holds no block beside scratch; one block takes {block_bytes} bytes",
        )
    return _with_room(blocks, config)


def _with_room(blocks: int, config: EngineConfig) -> int:
    """No request is shorter than a prompt of one token and its answer."""
    tokens = blocks * config.block_size
    if tokens < 2:
        raise StartUpError(
            FailureReason.USAGE,
            f"a KV cache of {blocks} block of block-size {config.block_size} holds {tokens} token; the shortest "
            "request takes 2",
        )
    return blocks


def _check_memory(
    description: ModelDescription, device: Device, dtype: torch.dtype, num_blocks: int, config: EngineConfig
) -> None:
    weights = parameter_count(description) * dtype.itemsize
    cache = (num_blocks + 1) * _kv_block_bytes(description, config.block_size, dtype)
    needed, available = weights + cache + PROCESS_RESERVE_BYTES, device.available_memory_bytes()
    if needed > available:
        raise StartUpError(
            FailureReason.INSUFFICIENT_MEMORY,
            f"{needed} bytes are needed ({weights} weights, {cache} KV cache, {PROCESS_RESERVE_BYTES} working memory), "
            f"{available} are available",
            path=config.model,
        )


def _kv_block_bytes(description: ModelDescription, block_size: int, dtype: torch.dtype) -> int:
    per_token = 2 * description.layers * description.kv_heads * description.head_dim * dtype.itemsize
    return per_token * block_size

"""What a card is: memory, speed, links, cost of compiling, and the defaults of the settings. Defaults stand only here.

Every constant can be replaced by a measured one.

Sources: capacities, matrix and memory rates and port counts from Intel's product pages for HL-225 and HL-325L; visible
memory as reported by the driver (GiB, so below the marketing figure only after conversion); collective bandwidth is
ports x line rate, of which the documented HCCL test reaches 98 %. Nothing here was measured by this project: it has
no card. `Calibration` is the place for what a card owner measures.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

GIB = 1 << 30
MIB = 1 << 20

CardName = Literal["gaudi2", "gaudi3", "cpu"]

MAX_NUM_SEQS: Final = 64
BLOCK_SIZE: Final = 128
RECIPES: Final = 128
"""Defaults of every card: requests in a step, tokens in a KV block, compiled recipes."""


class Seconds(BaseModel):
    """A range: without a measurement low and high differ and `measured` is false."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: float = Field(ge=0)
    high: float = Field(ge=0)
    measured: bool = False

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(low=self.low + other.low, high=self.high + other.high, measured=self.measured and other.measured)

    def times(self, count: float) -> Seconds:
        return Seconds(low=self.low * count, high=self.high * count, measured=self.measured)


class Processor(BaseModel):
    """What decides the types on a CPU. `bfloat16`: it multiplies bfloat16 faster than float32. `tiles`: it has AMX.
    `kernels_ahead`: the engine's kernels for it were built when it was installed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bfloat16: bool = False
    tiles: bool = False
    kernels_ahead: bool = False

    @classmethod
    def of(cls, instruction_sets: Set[str], *, kernels_ahead: bool) -> Processor:
        """`instruction_sets` as /proc/cpuinfo names them. oneDNN multiplies bfloat16 natively from AVX-512 on."""
        return cls(
            bfloat16=instruction_sets >= {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
            tiles=instruction_sets >= {"amx_tile", "amx_bf16"},
            kernels_ahead=kernels_ahead,
        )


class Card(BaseModel):
    """One accelerator. Rates in units per second, bandwidths in bytes per second and direction.

    `visible_bytes` None: as much as the host has, so the plan says what is needed and the engine compares it with what
    is available. `max_num_batched_tokens` is the default budget, `kv_cache_memory_bytes` the default size of the KV
    cache; None: all that is left. `processor` only of a CPU.

    `compile_seconds` and `load_seconds` are per recipe: made anew, or read from the recipe cache. `alpha_seconds` is
    the fixed cost of one collective. `efficiency` scales the matrix rate to what large products reach.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: CardName
    visible_bytes: int | None = Field(default=None, gt=0)
    max_num_batched_tokens: int = Field(default=4096, ge=1)
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    processor: Processor | None = None
    e4m3_max: float = Field(gt=0)
    matrix_flops_bf16: float = Field(gt=0)
    matrix_flops_fp8: float = Field(gt=0)
    efficiency: float = Field(default=0.6, gt=0, le=1)
    memory_bandwidth: float = Field(gt=0)
    scale_up_bandwidth: float = Field(gt=0)
    scale_out_bandwidth: float = Field(gt=0)
    alpha_seconds: float = Field(default=20e-6, ge=0)
    launch_seconds: float = Field(default=10e-6, ge=0)
    runtime_reserve_bytes: int = Field(default=768 * MIB, ge=0)
    graph_reserve_fraction: float = Field(default=0.1, ge=0, lt=1)
    graph_bytes_per_recipe: int | None = Field(default=None, ge=0)
    compile_seconds: Seconds
    load_seconds: Seconds
    calibrated: bool = False


CARDS: dict[CardName, Card] = {
    "gaudi2": Card(
        name="gaudi2",
        visible_bytes=int(94.6 * GIB),
        e4m3_max=240.0,
        matrix_flops_bf16=432e12,
        matrix_flops_fp8=865e12,
        memory_bandwidth=2.46e12,
        scale_up_bandwidth=21 * 12.5e9,
        scale_out_bandwidth=3 * 12.5e9,
        compile_seconds=Seconds(low=1.0, high=20.0),
        load_seconds=Seconds(low=0.1, high=1.0),
    ),
    "gaudi3": Card(
        name="gaudi3",
        visible_bytes=int(126.5 * GIB),
        e4m3_max=448.0,
        matrix_flops_bf16=1835e12,
        matrix_flops_fp8=1835e12,
        memory_bandwidth=3.67e12,
        scale_up_bandwidth=21 * 25e9,
        scale_out_bandwidth=3 * 25e9,
        compile_seconds=Seconds(low=1.0, high=20.0),
        load_seconds=Seconds(low=0.1, high=1.0),
    ),
    # One worker process on a small, typical host. Nothing is compiled; the reserve is the process beside its tensors.
    "cpu": Card(
        name="cpu",
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=512 * MIB,
        processor=Processor(),
        e4m3_max=448.0,
        matrix_flops_bf16=0.5e12,
        matrix_flops_fp8=0.5e12,
        memory_bandwidth=40e9,
        scale_up_bandwidth=5e9,
        scale_out_bandwidth=1e9,
        runtime_reserve_bytes=256 * MIB,
        graph_reserve_fraction=0.0,
        compile_seconds=Seconds(low=0.0, high=0.0, measured=True),
        load_seconds=Seconds(low=0.0, high=0.0, measured=True),
    ),
}


class CalibrationError(ValueError):
    """A calibration file cannot be used. Names the file and the key."""


class Calibration(BaseModel):
    """What was measured on a real card. Each key replaces the constant of the same name in `Card`.

    `compile_seconds` and `load_seconds` are single measured means here, per recipe.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    card: CardName
    source: str = Field(min_length=1, description="Who measured, when, on which software release.")
    visible_bytes: int | None = Field(default=None, gt=0)
    matrix_flops_bf16: float | None = Field(default=None, gt=0)
    matrix_flops_fp8: float | None = Field(default=None, gt=0)
    efficiency: float | None = Field(default=None, gt=0, le=1)
    memory_bandwidth: float | None = Field(default=None, gt=0)
    scale_up_bandwidth: float | None = Field(default=None, gt=0)
    scale_out_bandwidth: float | None = Field(default=None, gt=0)
    alpha_seconds: float | None = Field(default=None, ge=0)
    launch_seconds: float | None = Field(default=None, ge=0)
    runtime_reserve_bytes: int | None = Field(default=None, ge=0)
    graph_bytes_per_recipe: int | None = Field(default=None, ge=0)
    compile_seconds: float | None = Field(default=None, ge=0)
    load_seconds: float | None = Field(default=None, ge=0)

    def apply(self, card: Card) -> Card:
        """`card` with every measured constant in place of the published one. Raises CalibrationError."""
        if self.card != card.name:
            raise CalibrationError(f"card: measured on {self.card}, cannot calibrate {card.name}")
        update = self.model_dump(exclude={"card", "source"}, exclude_none=True)
        for key in ("compile_seconds", "load_seconds"):
            if key in update:
                update[key] = Seconds(low=update[key], high=update[key], measured=True)
        return card.model_copy(update=update | {"calibrated": True})


def read_calibration(file: Path) -> Calibration:
    """The calibration in the JSON `file`. Raises CalibrationError."""
    try:
        return Calibration.model_validate(json.loads(file.read_text()))
    except OSError as error:
        raise CalibrationError(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise CalibrationError(f"{file}: {key}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{file}: not JSON: {error}") from error

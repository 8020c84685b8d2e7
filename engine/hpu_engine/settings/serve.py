"""What `hpu-engine serve` can be told: one list of settings, from flags, `HPU_ENGINE_*` variables and a YAML file.

A flag wins over a variable, a variable over the file, the file over the default. The list is closed: an unknown key in
the file is an error that names it. Sizes are tokens unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from hpu_engine.contract import API_PORT, CONTROL_PORT, ModelIdentity, PlanInput
from hpu_engine.planning.cards import BLOCK_SIZE, MAX_NUM_SEQS
from hpu_engine.settings.engine import EngineConfig

ENV_PREFIX = "HPU_ENGINE_"


class SettingsError(Exception):
    """One or more settings are wrong; the text has a line for each, with what would be right."""


def _only_one(value: int) -> int:
    if value != 1:
        raise ValueError("this engine runs one worker per pod for now, so every parallel size must be 1")
    return value


def _split(value: object) -> object:
    """A list as flags and variables write one: with commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _origin(value: str) -> str:
    """As a browser spells an origin: nothing behind the host, lower case, no port that the scheme has anyway."""
    if value == "*":
        return value
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    default = {"http": 80, "https": 443}.get(parts.scheme) if host else None
    if not host or parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("an origin is * or scheme://host[:port], for example https://chat.example.com")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + ("" if port in (None, default) else f":{port}")


def _origins(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_origin, values))


Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_origins)]
Port = Annotated[int, Field(ge=0, le=65535)]
ParallelSize = Annotated[int, AfterValidator(_only_one)]


class ServeSettings(BaseSettings):
    """The settings of one server process. The descriptions are the command's help."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, protected_namespaces=())

    model: Path = Field(description="Directory of a Hugging Face checkpoint: config, safetensors, tokenizer.")
    served_model_name: str | None = Field(
        None, min_length=1, description="Name clients ask for. Default: the directory's name."
    )
    device: Literal["cpu"] = Field("cpu", description="Where the model runs.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Type of weights and KV cache. auto: the checkpoint's, or what the device runs best."
    )
    host: str = Field("::", description="Address of both ports; :: is every address, IPv6 and IPv4.")
    port: Port = Field(API_PORT, description="OpenAI-compatible API.")
    control_port: Port = Field(CONTROL_PORT, description="State, probes, metrics; answers from the first second.")
    allowed_origins: Origins = Field(
        (),
        description="Web origins whose pages may use the API, with commas between them; * for all. Default: none.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest prompt plus output. Default: what the model allows."
    )
    max_num_seqs: int = Field(MAX_NUM_SEQS, ge=1, le=4096, description="Requests in one step.")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Budget: tokens in one step. Default: the device's."
    )
    block_size: int = Field(BLOCK_SIZE, ge=1, le=1024, description="Tokens in one KV block.")
    kv_cache_memory: int | None = Field(
        None, ge=1, description="Bytes for the KV cache. Default: the device's (cpu: 512 MiB)."
    )
    num_kv_blocks: int | None = Field(
        None, ge=1, description="KV blocks; overrides --kv-cache-memory. Default: as many as it holds."
    )
    max_open_requests: int = Field(
        2048, ge=1, description="Sequences running or waiting; more are turned away with 429."
    )
    lame_duck_seconds: float = Field(
        0.0, ge=0, le=3600, description="After SIGTERM: how long new requests are still served."
    )
    drain_seconds: float = Field(
        30.0, ge=0, le=86400, description="After the lame duck: how long running requests may take to finish."
    )
    termination_log: Path | None = Field(None, description="File for the reason of a failure, as JSON. Default: none.")
    tensor_parallel_size: ParallelSize = Field(1, description="Workers that share one copy of the model.")
    data_parallel_size: ParallelSize = Field(1, description="Ranks, each with its own scheduler and KV cache.")
    expert_parallel_size: ParallelSize = Field(1, description="Workers that share the experts.")
    exact: bool = Field(
        False, description="A token's bits do not depend on what else runs, on chunks, or on cached prefixes (cpu)."
    )
    force_buckets: bool = Field(
        False, description="Pad every step to the planned buckets, as a device that compiles each shape needs it (cpu)."
    )

    kernels: Literal["auto", "torch"] = Field(
        "auto",
        description="auto: the engine's own kernels where they were built for this processor; torch: never (cpu).",
    )
    compile: bool = Field(
        False, description="Kernels compiled for this processor with g++ at the first start, float32 (cpu)."
    )
    compile_cache: Path | None = Field(
        None, description="Folder in which compiled kernels are kept. Default: below the user's cache."
    )

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    def engine_config(self) -> EngineConfig:
        """The part that the workers need."""
        given = {name: str(value) if isinstance(value, Path) else value for name, value in self}
        given["kv_cache_memory_bytes"] = self.kv_cache_memory
        return msgspec.convert({name: given[name] for name in EngineConfig.__struct_fields__}, EngineConfig)

    def identity(self) -> ModelIdentity:
        """What is known of the model before a worker has read it."""
        return ModelIdentity(served_name=self.model_name, path=str(self.model), max_model_len=self.max_model_len)

    def plan_input(self) -> PlanInput:
        """What was asked for; what the device settles on replaces it once the model is loaded."""
        return PlanInput(
            device=self.device,
            tensor=self.tensor_parallel_size,
            data=self.data_parallel_size,
            expert=self.expert_parallel_size,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_num_batched_tokens or 0,
            kv_blocks=self.num_kv_blocks,
        )


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def load_settings(flags: Mapping[str, Any], file: Path | None = None) -> ServeSettings:
    """Settings from the flags that were given, the environment and a file. Raises `SettingsError`."""
    from_file = _read(file) if file is not None else {}

    class Sources(ServeSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=from_file)

    try:
        return Sources(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        raise SettingsError("\n".join(_line(problem, flags, from_file, file) for problem in error.errors())) from None


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """A sentence for every variable that is named like a setting but is not one.

    They are not refused: Kubernetes adds variables to a pod for a Service that happens to be called `hpu-engine`.
    """
    known = [f"{ENV_PREFIX}{field.upper()}" for field in ServeSettings.model_fields]
    sentences = []
    for name in sorted(environment):
        if not name.upper().startswith(ENV_PREFIX) or name.upper() in known:
            continue
        wanted = {full.removeprefix(ENV_PREFIX): full for full in known}
        near = get_close_matches(name.upper().removeprefix(ENV_PREFIX), wanted, n=1)
        hint = f"; did you mean {wanted[near[0]]}?" if near else ""
        sentences.append(f"unknown setting {name[:200]} ignored{hint}")
    return sentences


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"--config {file}: cannot be read as YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SettingsError(f"--config {file}: must be a mapping of settings, for example `max-num-seqs: 64`")
    return {key.replace("-", "_"): value for key, value in content.items()}


def _line(problem: Any, flags: Mapping[str, Any], from_file: Mapping[str, Any], file: Path | None) -> str:
    field = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "missing":
        return f"{flag_of(field)} is required (or {ENV_PREFIX}{field.upper()}, or `{field}` in the --config file)"
    if problem["type"] == "extra_forbidden":
        return f"unknown setting `{field}` in {file}"
    origin = ""
    if flags.get(field) is None:
        origin = f" in {file}" if field in from_file else f" from {ENV_PREFIX}{field.upper()}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{flag_of(field)}{origin}: {message[:1].lower()}{message[1:]}; it was {problem['input']!r}"

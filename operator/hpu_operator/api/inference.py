"""`HpuInference`: what a user declares and what status answers.

Only fields that work are here. Defaults are in the schema, so that `kubectl get -o yaml` shows what is used; a rule's
message names the nearest valid value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from hpu_engine.planning.cards import BLOCK_SIZE, MAX_NUM_SEQS
from hpu_operator.api.formats import OBJECT_NAME
from hpu_operator.api.pod import PodSettings
from hpu_operator.api.schema import LIST_TYPE, MAP_KEYS, NEVER_RESTARTS, ApiModel, rule, rules

MAX_NAME_LENGTH = 63
MAX_REPLICAS = 1000
RANKS_SUFFIX = "-ranks"

OBJECT_RULES = (
    rule(
        f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
        f"metadata.name: at most {MAX_NAME_LENGTH} characters, because the name becomes a Service; use a shorter name",
    ),
    rule(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name: use a-z, 0-9 and -, starting with a letter and without dots, because the name becomes "
        f"a Service; at most {MAX_NAME_LENGTH} characters",
    ),
    rule(
        f"!self.metadata.name.endsWith('{RANKS_SUFFIX}')",
        f"metadata.name: must not end in {RANKS_SUFFIX}, which is reserved for the operator; use another name",
    ),
)

_PVC = f"self.matches('^pvc://{OBJECT_NAME[1:-1]}(/.*)?$')"
_CLAIM_BOUNDED = "!self.startsWith('pvc://') || self.substring(6).split('/', 2)[0].size() <= 253"
_NO_CONTROL = "!self.matches('[\\\\p{Cc}\\\\p{Zl}\\\\p{Zp}]')"
_FILE = "self.matches('^file:///.+$')"


def _only_one(what: str) -> dict[str, Any]:
    return rules(rule("self == 1", f"{what} other than 1 is not available in this version: use 1"))


class Model(ApiModel):
    """Which checkpoint, and the name clients use for it."""

    uri: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Folder with config.json, tokenizer and safetensors: pvc://CLAIM/PATH for a path of a "
        "PersistentVolumeClaim of the same namespace (mounted read-only), file:///PATH for a path in the container, "
        "from pod.volumes or the image.",
        json_schema_extra=rules(
            rule(
                f"{_PVC} || {_FILE}",
                "model.uri must be pvc://CLAIM/PATH, with the name of a PersistentVolumeClaim, or file:///PATH",
            ),
            rule(
                "!self.matches('(^|/)[.][.](/|$)')",
                "model.uri must not contain .. as a path element: write the path out",
            ),
            rule(_NO_CONTROL, "model.uri must not contain control characters or line breaks: remove them"),
            rule("self == self.trim()", "model.uri must not begin or end with a space: remove it"),
            rule(_CLAIM_BOUNDED, "the name of the claim in model.uri has at most 253 characters: use a shorter name"),
        ),
    )
    served_name: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None,
        description="Name in /v1/models and in requests. Absent: the name of this object.",
        json_schema_extra=rules(
            rule(_NO_CONTROL, "servedName must not contain control characters or line breaks: remove them"),
            rule("self == self.trim()", "servedName must not begin or end with a space: remove it"),
        ),
    )


class Parallelism(ApiModel):
    """How one group's cards share the model. One card per group in this version."""

    tensor: int = Field(
        default=1, ge=1, le=64, description="Cards that share each layer.", json_schema_extra=_only_one("tensor")
    )
    data: int = Field(
        default=1, ge=1, le=1024, description="Ranks that share the experts.", json_schema_extra=_only_one("data")
    )
    expert: int = Field(
        default=1,
        ge=1,
        le=65536,
        description="Cards over which the experts are spread: 1, or tensor x data.",
        json_schema_extra=_only_one("expert"),
    )
    cards_per_pod: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="Cards of one pod. Absent: the smaller of 8 and tensor x data.",
        json_schema_extra=_only_one("cardsPerPod"),
    )


class ChunkedPrefill(ApiModel):
    max_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1048576,
        description="The budget: tokens one step may carry, a multiple of blockSize. Absent: the device's default.",
    )


_BUDGET = "self.chunkedPrefill.maxBatchedTokens"
_NO_BUDGET = "!has(self.chunkedPrefill) || !has(self.chunkedPrefill.maxBatchedTokens)"
_MOST = "((self.maxModelLen * self.maxNumSeqs + self.blockSize - 1) / self.blockSize * self.blockSize)"


class Engine(ApiModel):
    """The engine's own settings."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                f"{_NO_BUDGET} || {_BUDGET} >= self.blockSize",
                computed=f"'chunkedPrefill.maxBatchedTokens %d is below blockSize: use %d or a multiple of it'"
                f".format([{_BUDGET}, self.blockSize])",
            ),
            rule(
                f"{_NO_BUDGET} || {_BUDGET} < self.blockSize || {_BUDGET} % self.blockSize == 0",
                computed=f"'chunkedPrefill.maxBatchedTokens %d is not a multiple of blockSize: use %d'"
                f".format([{_BUDGET}, ({_BUDGET} + self.blockSize / 2) / self.blockSize * self.blockSize])",
            ),
            rule(
                f"{_NO_BUDGET} || !has(self.maxModelLen) || {_BUDGET} <= {_MOST}",
                computed=f"'chunkedPrefill.maxBatchedTokens %d is more than maxModelLen x maxNumSeqs can fill: "
                f"use at most %d'.format([{_BUDGET}, {_MOST}])",
            ),
        )
    )
    device: Literal["cpu"] = Field(
        default="cpu", description="What computes. cpu asks for no card unless pod.resources does."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="Type of weights and arithmetic. auto: what the checkpoint was saved in."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=10485760,
        description="Longest prompt and answer together, in tokens. Absent: what the model allows.",
    )
    max_num_seqs: int = Field(
        default=MAX_NUM_SEQS, ge=1, le=4096, description="Requests that may run at the same time."
    )
    block_size: Literal[16, 32, 64, 128, 256] = Field(
        default=BLOCK_SIZE, description="Tokens per block of the KV cache."
    )
    chunked_prefill: ChunkedPrefill = Field(
        default=ChunkedPrefill(), description="How much of a long prompt is computed beside the other requests."
    )


class Spec(ApiModel):
    """What should be served, by how many groups."""

    model: Model = Field(description="Which model is served.")
    parallelism: Parallelism = Field(default=Parallelism(), description="How one group's cards share the model.")
    replicas: Annotated[int, NEVER_RESTARTS] = Field(
        default=1, ge=0, le=MAX_REPLICAS, description="Number of groups. Changing it restarts no running pod."
    )
    engine: Engine = Field(default=Engine(), description="The engine's own settings.")
    drain_seconds: int = Field(
        default=60,
        ge=0,
        le=3600,
        description="How long running requests may take to finish when their group is taken down.",
    )
    pod: PodSettings = Field(default=PodSettings(), description="Everything of the pods that is not the engine's.")


class Condition(ApiModel):
    """One fact about the object. Types: Accepted, Progressing, WarmedUp, Available, Ready."""

    type: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="Accepted, Available, Progressing, Ready or WarmedUp."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    observed_generation: int = Field(ge=0, description="Generation of the spec this is about.")
    last_transition_time: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})] = Field(
        description="When status last changed."
    )
    reason: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Z][A-Za-z0-9]*$")] = Field(
        description="One word of the reason catalogue."
    )
    message: Annotated[str, Field(max_length=2048)] = Field(description="What it means here, for people.")


class Status(ApiModel):
    """What the operator observed. Nothing here is needed to compute what should run."""

    observed_generation: int | None = Field(default=None, description="Generation this status is about.")
    conditions: tuple[Condition, ...] | None = Field(
        default=None,
        max_length=16,
        description="Sorted by type.",
        json_schema_extra={LIST_TYPE: "map", MAP_KEYS: ["type"]},
    )
    replicas: int | None = Field(default=None, description="Groups that exist.")
    ready_replicas: int | None = Field(default=None, description="Groups that answer, of any revision.")
    updated_replicas: int | None = Field(default=None, description="Groups of the current revision.")
    updated_ready_replicas: int | None = Field(default=None, description="Groups of the current revision that answer.")
    revision: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description="Revision the spec asks for."
    )
    image: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="Engine image of that revision."
    )
    served_name: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="Name of the model in requests."
    )
    url: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="Where clients inside the cluster find the API."
    )
    warm_up: Annotated[str, Field(max_length=32)] | None = Field(
        default=None, description="Buckets run and their total, in the group that is furthest behind."
    )
    selector: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="Label selector of one pod per group, for autoscalers."
    )

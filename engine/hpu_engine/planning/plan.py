"""The plan: everything a deployment costs, as one value. `make_plan` is what operator, engine and command call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hpu_engine.planning.cards import Card
from hpu_engine.planning.layout import Layout, layout_violations
from hpu_engine.planning.memory.budget import limit_violations, memory_violations
from hpu_engine.planning.memory.plan import MemoryPlan, memory_plan
from hpu_engine.planning.memory.weights import KvFormat, WeightFormat
from hpu_engine.planning.model.description import ModelDescription
from hpu_engine.planning.model.parameters import active_parameter_count, parameter_count
from hpu_engine.planning.shapes.buckets import BucketSet, plan_buckets
from hpu_engine.planning.shapes.limits import StepLimits
from hpu_engine.planning.shapes.step_cost import StepCost, step_cost
from hpu_engine.planning.shapes.trace import Lengths, assumed_histogram, fitted_histogram
from hpu_engine.planning.shapes.warm_up import WarmUpPlan, warm_up_plan
from hpu_engine.planning.traffic import Traffic, step_traffic
from hpu_engine.planning.violations import PlanError, Violation

DEFAULT_RECIPES = 128
DEFAULT_SEQUENCES = 64
DEFAULT_BUDGET = 4096
DEFAULT_BLOCK_SIZE = 128


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned. None means: what the model and the card suggest (`settled` fills it in)."""

    model: ModelDescription
    card: Card
    layout: Layout = field(default_factory=Layout)
    weight_format: WeightFormat | None = None
    kv_format: KvFormat | None = None
    max_model_len: int | None = None
    max_num_seqs: int = DEFAULT_SEQUENCES
    max_batched_tokens: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    kv_blocks: int | None = None
    recipes: int = DEFAULT_RECIPES
    trace: Sequence[Lengths] | None = None
    fp8_dispatch: bool = False

    def weights(self) -> WeightFormat:
        """fp8 for an fp8 checkpoint; on a Gaudi bfloat16 for everything else; on a CPU the checkpoint's own dtype."""
        if self.weight_format is not None:
            return self.weight_format
        if self.model.quantization == "fp8":
            return "fp8"
        return self.model.dtype if self.card.name == "cpu" else "bfloat16"

    def cache(self) -> KvFormat:
        if self.kv_format is not None:
            return self.kv_format
        weights = self.weights()
        return "bfloat16" if weights == "fp8" else weights

    def limits(self) -> StepLimits:
        length = self.model.max_positions if self.max_model_len is None else self.max_model_len
        budget = self.max_batched_tokens
        if budget is None:
            least = max(self.block_size, self.max_num_seqs)
            wanted = max(least, min(DEFAULT_BUDGET, self.max_num_seqs * length))
            budget = -(-wanted // self.block_size) * self.block_size
            budget = min(budget, max(least, self.max_num_seqs * length))
        return StepLimits(length, self.max_num_seqs, budget, self.block_size, self.kv_blocks)


@dataclass(frozen=True, slots=True)
class Plan:
    """One deployment of one group. `violations` empty and `memory.fits`: it can be run as it is."""

    request: PlanRequest
    limits: StepLimits
    parameters: int
    active_parameters: int
    memory: MemoryPlan
    cost: StepCost
    buckets: BucketSet
    warm_up: WarmUpPlan
    traffic: tuple[Traffic, ...]
    violations: tuple[Violation, ...]

    @property
    def fits(self) -> bool:
        return self.memory.fits and not self.violations

    @property
    def bytes_per_token(self) -> float:
        """Bytes a card receives per token of the group, over all layers, the sampled row's logits included."""
        return sum(line.bytes_per_token for line in self.traffic)


def make_plan(request: PlanRequest) -> Plan:
    """Plan it. Raises PlanError where layout or settings contradict themselves; a plan that does not fit is a plan."""
    limits = request.limits()
    contradictions = layout_violations(request.model, request.layout) + limit_violations(request.model, limits)
    if contradictions:
        raise PlanError(contradictions)
    memory = _memory(request, limits)
    # Where nothing fits, the buckets are those of a card that just holds one request.
    blocks = memory.kv_blocks if memory.fits else max(memory.kv_blocks, limits.blocks_per_row)
    bounded = replace(limits, kv_blocks=blocks)
    buckets = planned_buckets(request, bounded)
    dtype = "float32" if request.weights() == "float32" else "bfloat16"
    return Plan(
        request=request,
        limits=bounded,
        parameters=parameter_count(request.model),
        active_parameters=active_parameter_count(request.model),
        memory=memory,
        cost=_cost(request),
        buckets=buckets,
        warm_up=warm_up_plan(request.model, request.layout, request.card, buckets, dtype=dtype),
        traffic=step_traffic(request.model, request.layout, fp8_dispatch=request.fp8_dispatch),
        violations=memory_violations(limits, memory),
    )


def planned_buckets(request: PlanRequest, limits: StepLimits) -> BucketSet:
    """The buckets of `request` where its limits have come to `limits`. Raises TooFewRecipes."""
    histogram = assumed_histogram(limits) if request.trace is None else fitted_histogram(request.trace, limits)
    return plan_buckets(limits, _cost(request), histogram, recipes=request.recipes)


def fits(request: PlanRequest) -> MemoryPlan | None:
    """Only the memory of `request`, where it fits; None where it does not or contradicts itself."""
    limits = request.limits()
    if layout_violations(request.model, request.layout) or limit_violations(request.model, limits):
        return None
    memory = _memory(request, limits)
    return memory if memory.fits else None


def _memory(request: PlanRequest, limits: StepLimits) -> MemoryPlan:
    return memory_plan(
        request.model,
        request.layout,
        request.card,
        limits,
        weight_format=request.weights(),
        kv_format=request.cache(),
        recipes=request.recipes,
    )


def _cost(request: PlanRequest) -> StepCost:
    return step_cost(
        request.model,
        request.layout,
        request.card,
        weight_format=request.weights(),
        kv_format=request.cache(),
        block_size=request.block_size,
    )

"""How a model is cut over cards, and which cuts exist.

`tensor` cuts heads, vocabulary and MLP widths; `data` repeats attention over ranks that share their experts; `expert`
gives out whole experts over all cards of the group. A group is `tensor x data` cards in pods of `cards_per_pod`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpu_engine.planning.model.description import ModelDescription
from hpu_engine.planning.model.parameters import Cut, TensorRow
from hpu_engine.planning.violations import PlanError, Violation, nearest_valid

CARDS_PER_SERVER = 8
MOST_CARDS = 1024


@dataclass(frozen=True, slots=True)
class Layout:
    """One group. `cards_per_pod` None: as many as a server has, at most the whole group."""

    tensor: int = 1
    data: int = 1
    expert: int = 1
    cards_per_pod: int | None = None

    @property
    def cards(self) -> int:
        return self.tensor * self.data

    @property
    def pod_cards(self) -> int:
        return min(CARDS_PER_SERVER, self.cards) if self.cards_per_pod is None else self.cards_per_pod

    @property
    def pods(self) -> int:
        return self.cards // self.pod_cards

    @property
    def servers(self) -> int:
        return -(-self.cards // CARDS_PER_SERVER)

    def kv_heads_per_card(self, model: ModelDescription) -> int:
        """A card holds at least one KV head; with more cards than heads each head is held several times."""
        return max(1, model.kv_heads // self.tensor)

    def local_shape(self, model: ModelDescription, row: TensorRow) -> tuple[int, ...]:
        """The shape of one copy of `row` on one card."""
        if row.routed and self.expert > 1:
            return row.shape
        match row.cut:
            case Cut.NONE:
                return row.shape
            case Cut.ROWS:
                return (row.shape[0] // self.tensor, *row.shape[1:])
            case Cut.COLUMNS:
                return (row.shape[0], row.shape[1] // self.tensor)
            case Cut.KV_HEADS:
                return (self.kv_heads_per_card(model) * model.head_dim, *row.shape[1:])

    def local_copies(self, row: TensorRow) -> int:
        """How many copies of `row` one card holds."""
        return row.copies // self.expert if row.routed else row.copies

    def is_replicated(self, row: TensorRow) -> bool:
        """Whether every tensor-parallel card holds all of `row`."""
        return row.cut is Cut.NONE and self.tensor > 1


def layout_violations(model: ModelDescription, layout: Layout) -> tuple[Violation, ...]:
    """Every rule that `layout` breaks for `model`, each with the nearest values that keep it."""
    return tuple(_violations(model, layout))


def require_valid(model: ModelDescription, layout: Layout) -> None:
    """Raises PlanError with every violation."""
    if violations := layout_violations(model, layout):
        raise PlanError(violations)


def valid_tensor_sizes(model: ModelDescription, *, expert_parallel: bool, most: int = 64) -> tuple[int, ...]:
    """Tensor-parallel sizes that divide everything they must."""
    return tuple(n for n in range(1, most + 1) if not list(_tensor_rules(model, n, expert_parallel=expert_parallel)))


def _violations(model: ModelDescription, layout: Layout) -> Iterator[Violation]:
    sizes = (("tensor", layout.tensor), ("data", layout.data), ("expert", layout.expert))
    wrong = [(field, value) for field, value in sizes if not 1 <= value <= MOST_CARDS]
    for field, value in wrong:
        yield Violation(field, "positive", value, f"must lie between 1 and {MOST_CARDS}", (1,))
    if layout.cards_per_pod is not None and layout.cards_per_pod < 1:
        wrong.append(("cardsPerPod", layout.cards_per_pod))
        yield Violation("cardsPerPod", "positive", layout.cards_per_pod, "must be at least 1", (1,))
    if wrong:
        return
    yield from _tensor_violations(model, layout)
    yield from _expert_violations(model, layout)
    yield from _pod_violations(layout)


def _tensor_violations(model: ModelDescription, layout: Layout) -> Iterator[Violation]:
    expert_parallel = layout.expert > 1

    def valid(n: int) -> bool:
        return not list(_tensor_rules(model, n, expert_parallel=expert_parallel))

    for rule, message in _tensor_rules(model, layout.tensor, expert_parallel=expert_parallel):
        nearest = nearest_valid(layout.tensor, valid, most=max(model.heads, layout.tensor))
        yield Violation("tensor", rule, layout.tensor, message, nearest)


def _tensor_rules(model: ModelDescription, tensor: int, *, expert_parallel: bool) -> Iterator[tuple[str, str]]:
    """(rule, message) of every size that `tensor` does not divide."""
    sizes = [("heads", "attention heads", model.heads), ("vocab", "vocabulary", model.vocab)]
    if model.dense_layer_count:
        sizes.append(("intermediate", "dense intermediate size", model.intermediate))
    if model.moe is not None:
        if not expert_parallel:
            sizes.append(("moe-intermediate", "expert intermediate size", model.moe.intermediate))
        if model.moe.shared_experts:
            sizes.append(("shared-intermediate", "shared experts' size", model.moe.shared_intermediate))
    for rule, name, size in sizes:
        if size % tensor:
            yield rule, f"does not divide the {name} {size}"
    if model.kv_heads % tensor and tensor % model.kv_heads:
        yield "kv-heads", f"neither divides the KV heads {model.kv_heads} nor is a multiple of them"


def _expert_violations(model: ModelDescription, layout: Layout) -> Iterator[Violation]:
    if model.moe is None:
        if layout.expert > 1:
            yield Violation("expert", "dense", layout.expert, f"{model.architecture} has no experts", (1,))
        if layout.data > 1:
            yield Violation(
                "data", "dense", layout.data, "independent copies of a dense model are replicas, not data", (1,)
            )
        return
    experts = model.moe.experts
    if layout.expert not in (1, layout.cards):
        message = f"must be 1 or tensor x data = {layout.cards}"
        yield Violation("expert", "whole-group", layout.expert, message, _ordered(layout.expert, 1, layout.cards))
    if layout.expert > 1 and experts % layout.expert:
        nearest = nearest_valid(layout.expert, lambda n: experts % n == 0, most=experts)
        yield Violation("expert", "experts", layout.expert, f"does not divide the {experts} experts", nearest)
    if layout.data > 1 and layout.expert == 1:
        message = "data above 1 needs expert parallelism: without shared experts the ranks are replicas"
        yield Violation("data", "shared-experts", layout.data, message, (1,))


def _pod_violations(layout: Layout) -> Iterator[Violation]:
    """A pod holds whole ranks, a group whole pods, and a pod lives on one server."""

    def valid_pod(n: int) -> bool:
        return n % layout.tensor == 0 and layout.cards % n == 0

    if layout.tensor > CARDS_PER_SERVER:
        message = f"a rank lives on one server of {CARDS_PER_SERVER} cards"
        yield Violation("tensor", "server", layout.tensor, message, (CARDS_PER_SERVER,))
        return
    pod = layout.pod_cards
    nearest = nearest_valid(pod, valid_pod, most=min(CARDS_PER_SERVER, layout.cards))
    if not valid_pod(pod):
        message = f"must be a multiple of tensor {layout.tensor} and divide tensor x data {layout.cards}"
        yield Violation("cardsPerPod", "whole-ranks", pod, message, nearest)
    elif pod > CARDS_PER_SERVER:
        message = f"a server has {CARDS_PER_SERVER} cards"
        yield Violation("cardsPerPod", "server", pod, message, nearest)


def _ordered(value: int, *candidates: int) -> tuple[int, ...]:
    return tuple(sorted(set(candidates), key=lambda n: abs(n - value)))

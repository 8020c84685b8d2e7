"""A random MoE layer as plain tensors: its dense answer in float64, and the same layer built over a set of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hpu_engine.device.base import ExpertKernel, Linear
from hpu_engine.device.cpu.expert_kernels import sorted_kernel
from hpu_engine.device.cpu.torch_ops import TORCH_OPS
from hpu_engine.group.collectives import Alone, Collectives
from hpu_engine.model.moe.combiner import AllReduce, Combiner, LeavePartial, ReduceScatter, SingleRank
from hpu_engine.model.moe.dispatcher import Dispatcher, GatherDispatch, NoDispatch
from hpu_engine.model.moe.experts import WindowExperts
from hpu_engine.model.moe.layer import MoeLayer, SharedExperts
from hpu_engine.model.moe.router import Router, RoutingRule
from hpu_engine.model.moe.window import ExpertWindow, expert_window
from hpu_engine.model.transformer import DenseMlp

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 32, 24


@dataclass(frozen=True)
class RandomMoe:
    """`gate_up` [experts, 2 * width, hidden], `down` [experts, hidden, width]; the shared one alike, or None."""

    rule: RoutingRule
    router: Tensor
    correction: Tensor
    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor | None
    shared_down: Tensor | None

    @classmethod
    def draw(cls, *, shared: bool, seed: int = 0, dtype: torch.dtype = torch.float32) -> RandomMoe:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            drawn: Tensor = torch.randn(shape, generator=generator) * float(shape[-1]) ** -0.5
            return drawn.to(dtype)

        return cls(
            rule=RoutingRule(top_k=TOP_K, minimum=1e-12),
            router=3 * torch.randn(EXPERTS, HIDDEN, generator=generator) * HIDDEN**-0.5,
            correction=0.1 * torch.randn(EXPERTS, generator=generator),
            gate_up=random(EXPERTS, 2 * WIDTH, HIDDEN),
            down=random(EXPERTS, HIDDEN, WIDTH),
            shared_gate_up=random(2 * WIDTH, HIDDEN) if shared else None,
            shared_down=random(HIDDEN, WIDTH) if shared else None,
        )

    def dense(self, x: Tensor) -> Tensor:
        """Token by token in float64, with nothing of the engine but the choice of experts' rule in words."""
        result = torch.zeros(x.shape, dtype=torch.float64)
        for token, row in enumerate(x.double()):
            scores = (self.router.double() @ row).softmax(-1)
            chosen = (scores + self.correction.double()).topk(TOP_K).indices
            for expert in chosen:
                weight = scores[expert] / scores[chosen].sum()
                result[token] += weight * _mlp(self.gate_up[expert], self.down[expert], row)
            if self.shared_gate_up is not None and self.shared_down is not None:
                result[token] += _mlp(self.shared_gate_up, self.shared_down, row)
        return result

    # --- one rank of it

    def route(self) -> Router:
        return Router(self.rule, partial(F.linear, weight=self.router), self.router.dtype, self.correction)

    def expert_parallel(
        self, data: Collectives, tensor: Collectives, *, shares_tokens: bool, reduces: bool = True
    ) -> MoeLayer:
        """This rank's whole experts. Ranks share their tokens (`tensor` group) or have their own (`data` group)."""
        group = tensor if shares_tokens else data
        window = expert_window(EXPERTS, group.size, group.rank)
        dispatcher: Dispatcher = NoDispatch() if shares_tokens else GatherDispatch(data)
        return MoeLayer(
            router=self.route(),
            dispatcher=dispatcher,
            experts=WindowExperts(window, self.kernel(window)),
            combiner=_combiner(data, tensor, shares_tokens=shares_tokens, reduces=reduces),
            shared=self._shared(tensor) if shares_tokens else self._shared(Alone()),
        )

    def tensor_parallel(self, tensor: Collectives, *, reduces: bool = True) -> MoeLayer:
        """Every expert, cut along its width."""
        whole = ExpertWindow(0, EXPERTS - 1)
        return MoeLayer(
            router=self.route(),
            dispatcher=NoDispatch(),
            experts=WindowExperts(whole, self.kernel(whole, tensor)),
            combiner=_combiner(Alone(), tensor, shares_tokens=True, reduces=reduces),
            shared=self._shared(tensor),
        )

    def kernel(self, window: ExpertWindow, cut: Collectives | None = None) -> ExpertKernel:
        return sorted_kernel([self.expert(index, cut) for index in range(window.first, window.last + 1)])

    def expert(self, index: int, cut: Collectives | None = None) -> tuple[Linear, Linear]:
        return _linears(self.gate_up[index], self.down[index], cut or Alone())

    def _shared(self, cut: Collectives) -> SharedExperts | None:
        if self.shared_gate_up is None or self.shared_down is None:
            return None
        mlp = DenseMlp(*_linears(self.shared_gate_up, self.shared_down, cut), TORCH_OPS)
        return SharedExperts(mlp, is_partial=cut.size > 1)


def tokens(rows: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _combiner(data: Collectives, tensor: Collectives, *, shares_tokens: bool, reduces: bool) -> Combiner:
    if not reduces:
        return LeavePartial()
    if not shares_tokens:
        return ReduceScatter(data, tensor)
    return AllReduce(tensor) if tensor.size > 1 else SingleRank()


def _linears(gate_up: Tensor, down: Tensor, cut: Collectives) -> tuple[Linear, Linear]:
    width = down.shape[1] // cut.size
    here = slice(cut.rank * width, (cut.rank + 1) * width)
    gate, up = gate_up.chunk(2)
    return partial(F.linear, weight=torch.cat((gate[here], up[here]))), partial(F.linear, weight=down[:, here])


def _mlp(gate_up: Tensor, down: Tensor, row: Tensor) -> Tensor:
    gate, up = (gate_up.double() @ row).chunk(2)
    return down.double() @ (gate * gate.sigmoid() * up)

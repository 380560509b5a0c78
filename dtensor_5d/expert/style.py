"""`ExpertParallel`: the experts of a Hugging Face mixture of experts, some on each rank, tokens brought to them.

    parallelize_module(model, mesh["ep"], {"model.layers.*.mlp.experts": ExpertParallel()})

Only the experts' forward (tokens, indices, weights) is replaced: routers, shared experts and group-limited selection
stay the model's own, so a family needs no code here. Where the experts take no indices (llama4), name the block around
router and experts instead (`"model.layers.*.feed_forward"`). The ranks of the axis each have tokens of their own;
expert gradients are sums over the tokens of all of them, and nothing averages (contracts C1, C6). With `overlap` name
the block too: shared experts run while tokens travel (see `shared`).

Letters: T tokens, K choices, E experts, M model size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.expert.arguments import argument_violations
from dtensor_5d.expert.compute import ExpertForm, compute_experts, form_of
from dtensor_5d.expert.keep import keep_routing
from dtensor_5d.expert.place import check_experts, cut_experts
from dtensor_5d.expert.problems import Problems
from dtensor_5d.expert.route import told
from dtensor_5d.expert.shared import Around, SharedExperts
from dtensor_5d.expert.transport import TRANSPORTS, Buffers, Transport
from dtensor_5d.expert.variants import AllGatherDispatch, AllToAllDispatch, Dispatch, TwoStepDispatch
from dtensor_5d.ops import (
    WeightGradients,
    all_gather_reduce_scatter,
    all_gather_split,
    reduce_scatter_all_gather,
    split_all_gather,
)
from dtensor_5d.ops.exchange import gathered

__all__ = ["ExpertParallel", "experts_in"]

class ExpertParallel(ParallelStyle):
    """Cuts fused experts over the axis and brings them their tokens.

    dispatch: "all_to_all", "all_gather" or "two_step" (see `variants`), or a function that takes the group and the
    number of experts and returns a `Dispatch`. transport: "auto", "all_to_all", "direct", or a `Transport`. capacity:
    the share of an equal load that an expert takes at most, the rest is dropped by rank and token; None drops nothing.
    ranks_per_node: neighbouring ranks of the axis that share a node, for two_step. same_tokens: an axis whose ranks
    hold the same tokens (tensor parallel): each sends its part of them. store: where weight gradients wait. problems:
    where a wrong index or weight is noted; None: raised. overlap: a child of the named block (around `experts`), which
    calls it after the experts and on its own input, e.g. "shared_experts" of deepseek_v3: it runs while tokens travel,
    unless they do so by all_gather or a dispatch of your own. In a plan the last four are the model's.

    The mesh is that of ep, or ep x etp: then each expert is cut inside over etp, whose ranks take each other's tokens.
    One style for all layers shares the memory for rows on their way. Errors: PlanError for a dense module, experts that
    the axis does not divide, unknown options.
    """

    def __init__(
        self, *, dispatch: str | Callable[[dist.ProcessGroup, int], Dispatch] = "all_to_all",
        transport: str | Transport = "auto", capacity: float | None = None, ranks_per_node: int | None = None,
        same_tokens: DeviceMesh | None = None, store: WeightGradients | None = None,
        problems: Problems | None = None, overlap: str | None = None,
    ) -> None:  # fmt: skip
        given = {"dispatch": dispatch, "transport": transport, "capacity": capacity, "ranks_per_node": ranks_per_node,
                 "same_tokens": same_tokens, "overlap": overlap}  # fmt: skip
        if bad := argument_violations(given):
            raise PlanError(bad)
        self.dispatch, self.capacity, self.ranks_per_node = dispatch, capacity, ranks_per_node
        self.transport = TRANSPORTS[transport] if isinstance(transport, str) else transport
        self.same_tokens, self.store, self.problems, self.overlap = same_tokens, store, problems, overlap
        self._alike: Callable[[], bool] | None = None
        self.buffers = Buffers()
        self._steps: dict[dist.ProcessGroup, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}

    def bound(
        self, same_tokens: DeviceMesh | None, alike: Callable[[], bool], store: WeightGradients | None,
        problems: Problems, overlap: str | None,
    ) -> ExpertParallel:  # fmt: skip
        """This style with what a model in a `Run` gives it; shares the memory for rows on their way.

        alike: whether the ranks of same_tokens do hold the same ones in this forward.
        """
        made = copy.copy(self)
        made.same_tokens, made.store, made.problems, made.overlap = same_tokens, store, problems, overlap
        made._alike = alike
        return made

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts, is_block = experts_in(module if self.overlap is None else _child(module, "experts"))
        form = form_of(experts)
        count = check_experts(experts, form, device_mesh, type(experts).__name__)
        child = "shared_expert" if is_block else self.overlap
        shared = None if child is None else SharedExperts(_child(module, child))
        bring = self._bring(device_mesh.get_group(0), count, None if shared is None else shared.run)
        cut_experts(experts, form, device_mesh)
        inner = device_mesh.get_group(1) if device_mesh.ndim == 2 and device_mesh.size(1) > 1 else None
        experts.forward = _Routed(experts, form, bring, _group(self.same_tokens), self._alike, inner, self.store)
        if is_block and shared is not None:
            module.forward = _ScaledInput(module, shared)
        elif shared is not None:
            module.forward = Around(module.forward, shared)
        return module

    def _bring(self, group: dist.ProcessGroup, experts: int, meanwhile: Callable[[], None] | None) -> Dispatch:
        if not isinstance(self.dispatch, str):
            return self.dispatch(group, experts)
        transport, buffers, problems = self.transport, self.buffers, self.problems
        if self.dispatch == "all_gather":
            return AllGatherDispatch(group, experts, transport, buffers, self.capacity, problems)
        if self.dispatch == "all_to_all" or self.ranks_per_node is None:
            return AllToAllDispatch(group, experts, transport, buffers, self.capacity, problems, meanwhile)
        if group not in self._steps:
            self._steps[group] = _two_steps(group, self.ranks_per_node)
        return TwoStepDispatch(group, *self._steps[group], experts, transport, buffers, problems, meanwhile)

    def __repr__(self) -> str:
        # The same on all ranks: plans are compared by it.
        own = {"dispatch": self.dispatch, "transport": type(self.transport).__name__, "capacity": self.capacity,
               "ranks_per_node": self.ranks_per_node}  # fmt: skip
        return f"ExpertParallel({', '.join(f'{name}={value!r}' for name, value in own.items())})"


def _group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    return None if mesh is None or mesh.size() == 1 else mesh.get_group()


class _Routed:
    """The experts' forward: tokens, indices and weights of this rank -> what the experts of all ranks make of them.

    shared: ranks that hold the same tokens, where `alike` says so (None: always). inner: ranks that hold a part of each
    of the same experts.
    """

    def __init__(
        self, experts: nn.Module, form: ExpertForm, bring: Dispatch, shared: dist.ProcessGroup | None,
        alike: Callable[[], bool] | None, inner: dist.ProcessGroup | None, store: WeightGradients | None,
    ) -> None:  # fmt: skip
        self.experts, self.form, self.bring, self.store = experts, form, bring, store
        self.shared, self.alike, self.inner = shared, alike, inner

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [.., M], index [.., K], weights [.., K] -> like hidden."""
        hidden, choices = hidden_states.reshape(-1, hidden_states.size(-1)), top_k_index.size(-1)
        index, weights = keep_routing(top_k_index.reshape(-1, choices), top_k_weights.reshape(-1, choices))
        group, sizes = self.shared if self.alike is None or self.alike() else None, None
        if group is not None:
            sizes = _parts(hidden.size(0), group.size())
            hidden = split_all_gather(hidden, group, 0, sizes)
            weights = split_all_gather(weights, group, 0, sizes)
            index = index.split(sizes)[group.rank()]
        out = self._made(hidden, index, weights).to(hidden_states.dtype)
        if group is not None:
            out = all_gather_split(out, group, 0, sizes)
        return out if out.shape == hidden_states.shape else out.view_as(hidden_states)  # FSDP2 warns of views

    def _made(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Of this rank's own tokens. With etp each rank takes those of all ranks of etp and makes a summand of them."""
        if self.inner is None:
            return self.bring(hidden, index, weights, self._compute)
        group = self.inner
        sizes = [row[0] for row in told(index.new_tensor([index.size(0)]), group)]
        every = all_gather_reduce_scatter(hidden, group, 0, sizes)
        shares = all_gather_reduce_scatter(weights, group, 0, sizes)
        summand = self.bring(every, gathered(index, group, 0, sizes), shares, self._compute)
        return reduce_scatter_all_gather(summand, group, 0, sizes)

    def _compute(self, rows: Tensor, ends: Tensor) -> Tensor:
        first = self.inner is None or self.inner.rank() == 0
        return compute_experts(self.experts, self.form, rows, ends, self.store, first=first)


class _ScaledInput:
    """The forward of a block whose scores scale the experts' input (llama4): (out [T, M], router logits).

    The model runs all experts on all tokens, those not chosen on zeros; without biases they yield zeros, so that only
    the chosen ones need run. Each pair becomes a token of its own with the weight 1.
    """

    def __init__(self, block: nn.Module, shared: SharedExperts) -> None:
        self.block, self.shared = block, shared

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        block: Any = self.block
        hidden = hidden_states.reshape(-1, hidden_states.size(-1))
        scores, logits = block.router(hidden)
        index = logits.topk(block.top_k, dim=1).indices
        index, weights = keep_routing(index, scores.gather(1, index))
        scaled = (hidden.unsqueeze(1) * weights.unsqueeze(2)).flatten(0, 1)
        with self.shared.expected(hidden):
            # By its call, not its forward: FSDP's hooks bring the experts' weights.
            made = block.experts(scaled, index.reshape(-1, 1), weights.new_ones(index.numel(), 1))
            out = block.shared_expert(hidden)
        return out + made.view(*index.shape, hidden.size(1)).sum(1), logits


def experts_in(module: nn.Module) -> tuple[nn.Module, bool]:
    """The experts, and whether `module` is the block around them (experts that take no indices)."""
    children = dict(module.named_children())
    if {"router", "experts", "shared_expert"} <= set(children) and hasattr(module, "top_k"):
        return children["experts"], True
    if module._parameters.get("gate_up_proj") is not None and not hasattr(type(module), "_apply_gate"):
        raise PlanError(
            Violation(f"ExpertParallel on {type(module).__name__}", "its forward takes no router indices",
                      "name the block around router and experts instead")
        )  # fmt: skip
    return module, False


def _child(module: nn.Module, name: str) -> nn.Module:
    child = module._modules.get(name)
    if child is None:
        raise PlanError(
            Violation(f"ExpertParallel with overlap on {type(module).__name__}", f"must have a child {name!r}",
                      "name the block around experts and shared experts, or leave overlap out")
        )  # fmt: skip
    return child


def _two_steps(group: dist.ProcessGroup, lanes: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The ranks of this lane on all nodes, and the ranks of this node."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) % lanes:
        legal = [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
        raise PlanError(
            Violation(f"dispatch='two_step' with ranks_per_node={lanes} for ep={len(ranks)}",
                      f"must divide the {len(ranks)} ranks of ep", f"use ranks_per_node {legal}, or all_to_all")
        )  # fmt: skip
    node, lane = divmod(group.rank(), lanes)
    across, inside = ranks[lane::lanes], ranks[node * lanes : (node + 1) * lanes]
    # Only the members take part: other groups of the axis do the same at the same time.
    return tuple(
        dist.new_group(part, use_local_synchronization=True, group_desc=f"ep_{name}")
        for part, name in ((across, "across"), (inside, "inside"))
    )  # type: ignore[return-value]  # mypy does not count a generator's items


def _parts(length: int, ranks: int) -> list[int]:
    """As even as can be, the first ones longer.

    Example:
        >>> _parts(7, 4)
        [2, 2, 2, 1]
    """
    return [length // ranks + (rank < length % ranks) for rank in range(ranks)]

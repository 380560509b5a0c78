"""The experts themselves, on rows sorted by expert: whatever fused form a Hugging Face family stores them in.

| form | gate_up_proj | down_proj | biases | families |
|---|---|---|---|---|
| plain | [E, 2I, M], gate above up | [E, M, I] | | most |
| without gate | up_proj [E, I, M] | [E, M, I] | | nemotron_h |
| transposed | [E, M, 2I] | [E, I, M] | | llama4, aria |
| transposed, interleaved, biased | [E, M, 2I], gate and up in turn | [E, I, M] | [E, 2I], [E, M] | gpt_oss |

The products are `ops.grouped_matmul`: torch's kernel, or a loop over unbound experts where it does not fit (fp64, odd
widths), any number of rows an expert including 0; their weight gradients can wait in a store. Gating is the model's own
`_apply_gate`; transformers' default with SiLU runs as one operation that saves its input only.

Letters: R rows, E experts here, I inner size, M model size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.ops import WeightGradients, added_once, grouped_matmul

__all__ = ["ExpertForm", "compute_experts", "form_of"]


@dataclass(frozen=True)
class ExpertForm:
    """How a module stores its experts: which parameters, and along which dim of each the inner size I runs.

    halves: parameters that hold gate and up one after the other (else they alternate, or there is no gate).
    """

    up: str
    transposed: bool
    gated: bool
    biased: bool
    swiglu: bool
    halves: tuple[str, ...] = ()

    @property
    def inner_dims(self) -> dict[str, int]:
        """Parameter -> the dim that holds I (or gate and up, 2I); a bias of the down projection has none."""
        dims = {self.up: 2 if self.transposed else 1, "down_proj": 1 if self.transposed else 2}
        return {**dims, f"{self.up}_bias": 1} if self.biased else dims

    @property
    def parameters(self) -> tuple[str, ...]:
        names = (self.up, "down_proj")
        return (*names, *(f"{name}_bias" for name in names)) if self.biased else names


def form_of(experts: nn.Module, name: str = "the experts") -> ExpertForm:
    """The form of a module of fused experts, from what transformers notes on it and else from the shapes.

    Errors: PlanError for a module without fused experts, or with parameters that no form knows.
    """
    own = {key: p for key, p in experts._parameters.items() if p is not None}
    up = next((key for key in ("gate_up_proj", "up_proj") if key in own), None)
    fused = up is not None and "down_proj" in own and own[up].dim() == own["down_proj"].dim() == 3
    if up is None or not fused:
        raise PlanError(
            Violation(
                f"ExpertParallel on {name} ({type(experts).__name__})",
                "must hold fused experts: 3-D parameters gate_up_proj (or up_proj) and down_proj",
                "name the experts module of a mixture-of-experts model; a dense model has none: use ep=1",
            )
        )
    first, second = own[up].shape, own["down_proj"].shape
    by_shape = first[1] == second[2] and first[1] != second[1]
    gated = getattr(experts, "has_gate", up == "gate_up_proj")
    form = ExpertForm(
        up=up,
        transposed=getattr(experts, "is_transposed", by_shape),
        gated=gated,
        biased=getattr(experts, "has_bias", f"{up}_bias" in own),
        swiglu=gated and _is_swiglu(experts),
        halves=(up, f"{up}_bias") if gated and getattr(experts, "is_concatenated", True) else (),
    )
    strange = sorted(set(dict(experts.named_parameters())) - set(form.parameters))
    if getattr(experts, "has_post_expert_norm", False):
        strange = [*strange, "post_expert_norm"]
    if strange:
        raise PlanError(
            Violation(
                f"ExpertParallel on {name} ({type(experts).__name__}) with {strange}",
                f"all parts must belong to one expert each; known are {list(form.parameters)}",
                "use ep=1, etp=1 and tp=1 for this family",
            )
        )
    return form


def compute_experts(
    experts: nn.Module, form: ExpertForm, rows: Tensor, ends: Tensor, store: WeightGradients | None = None,
    *, first: bool = True,
) -> Tensor:  # fmt: skip
    """What the experts make of their rows, unweighted: [R, M] sorted by expert, ends [E] int32 -> [R, M].

    The parameters are read from the module at each call (FSDP swaps them), plain or as DTensors cut over experts, and
    inside over etp: then what comes out is a summand. first: this rank's summand has the bias of outputs.
    """
    weight, down = _own(experts, form.up), _own(experts, "down_proj")
    if not form.transposed:
        weight, down = weight.transpose(1, 2), down.transpose(1, 2)
    of_row = None
    if form.biased:
        of_row = torch.bucketize(torch.arange(rows.size(0), device=rows.device), ends, right=True)
    y = grouped_matmul(rows, weight, ends, store)
    y = _biased(y, experts, f"{form.up}_bias", of_row)
    y = _activated(y, experts, form)
    y = grouped_matmul(y, down, ends, store)
    return _biased(y, experts, "down_proj_bias", of_row, first)


def _biased(y: Tensor, experts: nn.Module, name: str, of_row: Tensor | None, here: bool = True) -> Tensor:
    if of_row is None:
        return y
    return y.add_(added_once(_own(experts, name), here).index_select(0, of_row))


def _own(experts: nn.Module, name: str) -> Tensor:
    """This rank's part. Before any view of it: a gradient that waits finds its parameter through views of a part."""
    parameter = getattr(experts, name)
    assert isinstance(parameter, Tensor)
    return parameter.to_local(grad_placements=parameter.placements) if isinstance(parameter, DTensor) else parameter


def _activated(y: Tensor, experts: nn.Module, form: ExpertForm) -> Tensor:
    if form.swiglu:
        activated: Tensor = _SwiGLU.apply(y)
    elif form.gated and hasattr(experts, "_apply_gate"):
        activated = experts._apply_gate(y)
    elif form.gated:
        gate, up = y.chunk(2, -1)
        activated = up * experts.act_fn(gate)
    else:
        activated = experts.act_fn(y)
    return activated


def _is_swiglu(experts: nn.Module) -> bool:
    gate = getattr(type(experts), "_apply_gate", None)
    act = getattr(experts, "act_fn", None)
    default = gate is None or getattr(gate, "__module__", "") == "transformers.integrations.moe"
    return default and (act is F.silu or isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation")


class _SwiGLU(Function):
    """Forward: a = silu(gate) up, from [R, 2I] with gate left and up right. Backward: both gradients side by side.

    The same operations as the plain form, so the same numbers; but nothing is saved except the input, and on the CPU
    they go through blocks that stay in the cache.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        a = gate_up.new_empty(gate_up.size(0), gate_up.size(1) // 2)
        block = _block(gate_up)
        for both, out in zip(gate_up.split(block), a.split(block)):
            gate, up = both.chunk(2, 1)
            torch.mul(F.silu(gate), up, out=out)
        return a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]  # torch: (*grads: Any)
        (gate_up,) = ctx.saved_tensors
        d = torch.empty_like(gate_up)
        block = _block(gate_up)
        for both, da, out in zip(gate_up.split(block), g.split(block), d.split(block)):
            gate, up = both.chunk(2, 1)
            d_gate, d_up = out.chunk(2, 1)
            torch.mul(da, F.silu(gate), out=d_up)
            d_gate.copy_(torch.ops.aten.silu_backward(da * up, gate))
        return d


def _block(x: Tensor) -> int:
    """Rows of a block: about 256 KiB on the CPU, all of them elsewhere."""
    if x.device.type != "cpu":
        return max(1, x.size(0))
    return max(1, (1 << 18) // max(1, x.size(1) * x.element_size()))

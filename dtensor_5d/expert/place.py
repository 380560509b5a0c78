"""Expert parameters over the axes: each rank keeps its experts, cut along dim 0 over ep and inside over etp.

                      ep 2, 4 experts                    ep 2 x etp 2
    gate_up [4, 2I, M]  rank 0: e0 e1, rank 1: e2 e3     rank 0: of e0 e1 the upper half of gate and that of up, ...

E experts, I inner size, M model size.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_5d.errors import PlanError, Violation
from dtensor_5d.expert.compute import ExpertForm
from dtensor_5d.placing import placed
from dtensor_5d.sections import Sections, note_sections

__all__ = ["check_experts", "cut_experts", "expert_violations_of"]


def expert_violations_of(experts: nn.Module, form: ExpertForm, ep: int, etp: int, name: str) -> list[Violation]:
    """What keeps a module of fused experts from being cut over ep x etp ranks."""
    found = []
    sizes = {key: p.shape[0] for key in form.parameters if (p := experts._parameters.get(key)) is not None}
    count = sizes[form.up]
    if set(sizes.values()) != {count} or count % ep:
        found.append(
            Violation(f"ep={ep} for {name} with {count} experts", f"ep must divide the {count} experts",
                      f"use an ep of {_divisors(count)}")
        )  # fmt: skip
    down = experts._parameters["down_proj"]
    assert down is not None
    inner = down.shape[form.inner_dims["down_proj"]]
    if inner % etp:
        found.append(
            Violation(f"etp={etp} for {name} with an inner size of {inner}", f"etp must divide {inner}",
                      f"use an etp of {_divisors(inner)}")
        )  # fmt: skip
    cut = [key for key in sizes if isinstance(experts._parameters[key], DTensor)]
    if cut:
        found.append(
            Violation(f"ExpertParallel on {name}, whose {cut[0]} is cut over ranks already", "must be plain tensors",
                      "apply ExpertParallel once, before any other style and before fully_shard")
        )  # fmt: skip
    return found


def check_experts(experts: nn.Module, form: ExpertForm, mesh: DeviceMesh, name: str) -> int:
    """The number of experts E of a module that the ranks of `mesh` are to share; PlanError if they cannot."""
    found = expert_violations_of(experts, form, mesh.size(0), mesh.size(1) if mesh.ndim == 2 else 1, name)
    if found:
        raise PlanError(found)
    up = experts._parameters[form.up]
    assert up is not None
    return up.shape[0]


def cut_experts(experts: nn.Module, form: ExpertForm, mesh: DeviceMesh) -> None:
    """Replaces each parameter by this rank's part. Nothing is communicated; meta stays meta.

    mesh: the ranks of ep, or ep x etp.
    """
    for name in form.parameters:
        whole = experts._parameters[name]
        assert whole is not None
        if mesh.ndim == 1:
            experts._parameters[name] = placed(whole, mesh, [Shard(0)])
            continue
        dim = form.inner_dims.get(name)
        packed = None
        if dim is not None and name in form.halves:
            half = whole.shape[dim] // 2
            packed = Sections(dim, (half, half), mesh.size(1))
            note_sections(experts, name, packed)
        inside = Replicate() if dim is None else Shard(dim)
        experts._parameters[name] = placed(whole, mesh, [Shard(0), inside], packed)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]

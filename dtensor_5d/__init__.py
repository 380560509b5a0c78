"""dtensor_5d: train unmodified Hugging Face causal language models over five axes at once.

Importing the package loads neither torch nor torchao; a name loads what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtensor_5d.adapters.planning import plan_for
    from dtensor_5d.assemble import parallelize
    from dtensor_5d.context import ContextParallel, cut_batch
    from dtensor_5d.degrees import Degrees
    from dtensor_5d.errors import PlanError, Violation
    from dtensor_5d.expert import ExpertParallel
    from dtensor_5d.mesh import Mesh, build_mesh
    from dtensor_5d.options import Options
    from dtensor_5d.plan import Plan
    from dtensor_5d.run import Run

__version__ = "0.1.0"

_HOME = {
    # before launch
    "Degrees": "dtensor_5d.degrees",
    "Options": "dtensor_5d.options",
    "Plan": "dtensor_5d.plan",
    "plan_for": "dtensor_5d.adapters.planning",
    # at run time
    "Mesh": "dtensor_5d.mesh",
    "build_mesh": "dtensor_5d.mesh",
    "parallelize": "dtensor_5d.assemble",
    "Run": "dtensor_5d.run",
    # styles that work alone
    "ContextParallel": "dtensor_5d.context",
    "ExpertParallel": "dtensor_5d.expert",
    "cut_batch": "dtensor_5d.context",
    # errors
    "PlanError": "dtensor_5d.errors",
    "Violation": "dtensor_5d.errors",
}

__all__ = [
    "ContextParallel", "Degrees", "ExpertParallel", "Mesh", "Options", "Plan", "PlanError", "Run", "Violation",
    "build_mesh", "cut_batch", "parallelize", "plan_for",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in ("planner", "schedule"):
        value = importlib.import_module(f"dtensor_5d.{name}")
    else:
        raise AttributeError(f"module 'dtensor_5d' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "planner", "schedule", "__version__"])

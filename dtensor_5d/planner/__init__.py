"""What a layout costs, before anything is launched. No torch here; a name loads what it needs when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtensor_5d.families.shape import ModelShape
    from dtensor_5d.planner.cut import cut_layers, split_layers
    from dtensor_5d.planner.memory_model import memory
    from dtensor_5d.planner.memory_report import CAUSES, Device, MemoryReport, RankMemory, StageMemory
    from dtensor_5d.planner.state import Widths, state_terms

_HOME = {
    # what a model is
    "ModelShape": "dtensor_5d.families.shape",
    # what it needs of memory
    "CAUSES": "dtensor_5d.planner.memory_report",
    "Device": "dtensor_5d.planner.memory_report",
    "MemoryReport": "dtensor_5d.planner.memory_report",
    "RankMemory": "dtensor_5d.planner.memory_report",
    "StageMemory": "dtensor_5d.planner.memory_report",
    "memory": "dtensor_5d.planner.memory_model",
    # which layers a stage has
    "cut_layers": "dtensor_5d.planner.cut",
    "split_layers": "dtensor_5d.planner.cut",
    # its terms
    "Widths": "dtensor_5d.planner.state",
    "state_terms": "dtensor_5d.planner.state",
}

__all__ = [
    "CAUSES", "Device", "MemoryReport", "ModelShape", "RankMemory", "StageMemory", "Widths", "cut_layers", "memory",
    "split_layers", "state_terms",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dtensor_5d.planner' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""What a layout costs, before anything is launched. No torch here."""

from dtensor_5d.families.shape import ModelShape
from dtensor_5d.planner.memory import memory
from dtensor_5d.planner.memory_report import CAUSES, Device, MemoryReport, RankMemory, StageMemory
from dtensor_5d.planner.stages import split_layers
from dtensor_5d.planner.state import Widths, state_terms

__all__ = [
    "CAUSES", "Device", "MemoryReport", "ModelShape", "RankMemory", "StageMemory", "Widths", "memory", "split_layers",
    "state_terms",
]  # fmt: skip

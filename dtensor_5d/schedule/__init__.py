"""Pipeline schedules as data: build, check, simulate, lower. Needs no torch.

    schedule = build("zbv", ranks=4, microbatches=8)
    print(simulate(schedule, Costs(1, 1, 1)).bubble_rate)
"""

from __future__ import annotations

from dtensor_5d.schedule.actions import Action
from dtensor_5d.schedule.build import build
from dtensor_5d.schedule.check import check
from dtensor_5d.schedule.costs import Costs
from dtensor_5d.schedule.data import Schedule
from dtensor_5d.schedule.lower import lower
from dtensor_5d.schedule.simulate import TimedAction, Timeline, simulate

__all__ = ["Action", "Costs", "Schedule", "TimedAction", "Timeline", "build", "check", "lower", "simulate"]

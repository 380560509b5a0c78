"""Schedules that several tests look at, built once: they are frozen, so that sharing them is safe."""

from __future__ import annotations

from functools import cache

from dtensor_5d.schedule import build


@cache
def made(name, ranks=4, microbatches=8):
    """`build` under unit costs."""
    return build(name, ranks=ranks, microbatches=microbatches)

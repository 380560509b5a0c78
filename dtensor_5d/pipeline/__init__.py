"""The pipeline axis: a model cut into stages, and the runtime that runs their schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtensor_5d.pipeline.style import PipelineParallel

__all__ = ["PipelineParallel"]


def __getattr__(name: str) -> Any:
    # The style reads rules that read how a model is cut, which is in this folder: loaded when it is asked for.
    if name != "PipelineParallel":
        raise AttributeError(f"module 'dtensor_5d.pipeline' has no attribute {name!r}")
    from dtensor_5d.pipeline.style import PipelineParallel

    return PipelineParallel

"""Whether an attention module says in its call what one process says with a mask.

Over the context axis transformers makes no masks: the window of a layer is the argument `sliding_window` of its call,
and whether it looks ahead is its `is_causal`. Some families say the one and do the other:

| | mask of one process | call |
|---|---|---|
| phimoe, qwen2_moe | with `config.sliding_window` | without a window |
| olmoe | without a window | with `config.sliding_window` |
| any whose `config.sliding_window` was changed after the model was built | the new window | the old one |
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

from dtensor_5d.errors import Violation

__all__ = ["mask_violations"]

_WINDOWED_MASK = "create_sliding_window_causal_mask"


def mask_violations(module: nn.Module) -> list[Violation]:
    """Where the mask of one process and the call of this attention module differ, or the module looks ahead.

    module: one that `dispatches_attention`.
    Example: phimoe with `sliding_window=8` -> one, `sliding_window=8 in PhimoeAttention over the context axis`.
    """
    config: Any = module.config
    name, window = type(module).__name__, getattr(config, "sliding_window", None)
    bad = []
    if not (getattr(module, "is_causal", True) and getattr(config, "is_causal", True)):
        change = "set use_bidirectional_attention=False (is_causal=True) in the config, or cp=1"
        bad.append(Violation(f"attention that looks ahead ({name})", "must be causal over the context axis", change))
    if window is None:
        return bad
    masked, said = _makes_windowed_masks(module), _says_window(module)
    needs = None
    if masked and not said and getattr(config, "use_sliding_window", True) is not False:
        needs = "must reach the attention function, but this family says it with a mask only"
    elif said and not masked:
        needs = "one process would not apply it, for this family makes its masks without a window"
    elif said and _is_windowed(module) and getattr(module, "sliding_window", window) != window:
        needs = f"must be the window that the module was built with: {module.sliding_window}"
    if needs is not None:
        off = "use_sliding_window=False" if hasattr(config, "use_sliding_window") else "sliding_window=None"
        change = f"build the model with {off} in the config, or use cp=1"
        bad.append(Violation(f"sliding_window={window} in {name} over the context axis", needs, change))
    return bad


def _makes_windowed_masks(module: nn.Module) -> bool:
    """Whether the file of the family (of a class that this one derives from) knows transformers' windowed mask."""
    files = [sys.modules.get(base.__module__) for base in type(module).__mro__]
    return any(hasattr(file, _WINDOWED_MASK) for file in files)


def _says_window(module: nn.Module) -> bool:
    """Whether the forward names `sliding_window` in a call: names of arguments are constants of its code."""
    code = inspect.unwrap(type(module).forward).__code__
    return any(isinstance(names, tuple) and "sliding_window" in names for names in code.co_consts)


def _is_windowed(module: nn.Module) -> bool:
    types, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    return types is None or index is None or types[index] == "sliding_attention"

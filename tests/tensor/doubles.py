"""fp64 all the way: transformers computes norms and softmax in fp32 whatever the dtype, which hides exactness."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class StayDouble(TorchFunctionMode):
    """Conversions of fp64 tensors to fp32 do nothing, for the reference and for what is compared with it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wide = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if wide and func is torch.Tensor.float:
            return args[0]
        if wide and func is torch.Tensor.to and torch.float32 in (*args[1:], kwargs.get("dtype")):
            return args[0]
        if wide and func in (F.softmax, torch.softmax) and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = None
        return func(*args, **kwargs)

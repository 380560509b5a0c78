"""The context axis: attention over a sequence that is cut over ranks."""

from dtensor_5d.context.alone import cut_batch
from dtensor_5d.context.attention import Kept
from dtensor_5d.context.mask import Mask
from dtensor_5d.context.scope import STRATEGIES, Scope, attend, attend_keeping
from dtensor_5d.context.style import ContextParallel

__all__ = ["STRATEGIES", "ContextParallel", "Kept", "Mask", "Scope", "attend", "attend_keeping", "cut_batch"]

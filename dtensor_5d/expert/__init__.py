"""The expert axis: where tokens go (`route`), how (`transport`, `dispatch`, `variants`), what experts do with them
(`compute`), what runs meanwhile (`shared`)."""

from dtensor_5d.expert.style import ExpertParallel

__all__ = ["ExpertParallel"]

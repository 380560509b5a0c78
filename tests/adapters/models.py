"""Tiny models on the meta device."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.families.tiny import tiny_config

__all__ = ["meta_model", "shared_meta_model"]


def meta_model(name: str, **overrides: object) -> PreTrainedModel:
    """The tiny model of a family, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(name, **overrides))


@cache
def shared_meta_model(name: str) -> PreTrainedModel:
    """The same one for all tests, which only read it."""
    return meta_model(name)

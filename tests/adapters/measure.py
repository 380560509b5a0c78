"""Measures the facts of a family on its tiny model: what `dtensor_5d.families.facts` states as data."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dtensor_5d.families.facts import FamilyFacts
from tests.families.tiny import VOCAB, tiny_config, tiny_model

__all__ = ["measure"]

# Two documents in one row; the border falls on no chunk, block or window of the tiny models (16).
_LENGTH, _BORDER = 24, 11
_RESTART = torch.cat([torch.arange(_BORDER), torch.arange(_LENGTH - _BORDER)])[None]


def measure(name: str) -> FamilyFacts:
    """The facts of the family `name` of `tests.families.tiny`, each one found by running its tiny model on the CPU."""
    own = tuple(attn for attn in ("eager", "sdpa") if _runs(name, attn))
    return FamilyFacts(
        packs_by_position=all(_separates(name, attn) for attn in own),
        takes_position_ids=_takes_positions(name),
        attention=own + (("custom",) if _asks_the_interface(name) else ()),
        aux_loss=_has_aux_loss(name),
        randomness=_randomness(name),
        shared_after=_shared_after(name),
    )


def _tokens() -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, _LENGTH), generator=torch.Generator().manual_seed(0))


def _logits(model: PreTrainedModel, tokens: torch.Tensor, seed: int = 0, **inputs: object) -> torch.Tensor:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model(input_ids=tokens, use_cache=False, **inputs).logits


def _distance(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).abs().max() / one.abs().max())


def _takes_positions(name: str) -> bool:
    """Whether positions given are positions used: some forwards swallow them unread."""
    model, tokens = tiny_model(name).eval(), _tokens()
    return not torch.equal(_logits(model, tokens), _logits(model, tokens, position_ids=_RESTART))


def _separates(name: str, attn: str) -> bool:
    """Whether positions that start at 0 again make document 2 of a packed row what it is alone.

    A changed token of document 1 must leave every logit of document 2 alone, in training mode. In float64 with each
    expert's rows by themselves that is exact. In eval mode (equal dropout is none) document 2 must equal its own run,
    up to the fp32 that some families compute positions and softmax in.
    """
    model = tiny_model(name, attn=attn, experts="eager", dtype=torch.float64)
    tokens, changed = _tokens(), _tokens()
    changed[0, 5] = (changed[0, 5] + 1) % VOCAB
    # The measurement must be able to fail: without the restart the token does reach document 2.
    one, two = (_logits(model, t)[0, _BORDER:] for t in (tokens, changed))
    assert _distance(one, two) > 1e-3
    one, two = (_logits(model, t, position_ids=_RESTART)[0, _BORDER:] for t in (tokens, changed))
    model.eval()
    packed = _logits(model, tokens, position_ids=_RESTART)[0, _BORDER:]
    alone = _logits(model, tokens[:, _BORDER:])[0]
    return _distance(one, two) < 1e-12 and _distance(packed, alone) < 1e-5


def _runs(name: str, attn: str) -> bool:
    try:
        model = tiny_model(name, attn=attn)
    except ValueError:  # transformers' own refusal
        return False
    return bool(torch.isfinite(_logits(model, _tokens())).all())


def _asks_the_interface(name: str) -> bool:
    """Whether a registered attention function is asked, gets by without a mask, and decides what comes out."""
    gain = 1.0

    # transformers' own names: most families pass the mask by position, some by keyword.
    def attend(module, query, key, value, attention_mask, **_kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return gain * out.transpose(1, 2), None

    AttentionInterface.register("measure", attend)
    try:
        model = tiny_model(name, attn="measure")
        plain = _logits(model, _tokens())
        gain = 2.0
        return not torch.equal(plain, _logits(model, _tokens()))
    except (KeyError, TypeError, ValueError):
        return False


def _has_aux_loss(name: str) -> bool:
    try:
        output = tiny_model(name)(input_ids=_tokens(), use_cache=False, output_router_logits=True)
    except (TypeError, ValueError):
        return False
    return getattr(output, "aux_loss", None) is not None


def _randomness(name: str) -> tuple[str, ...]:
    """What makes two training-mode forwards differ, with the chances that the family's config has by default."""
    defaults = CONFIG_MAPPING[tiny_config(name).model_type]()
    chances = {key: value for key, value in vars(defaults).items() if "drop" in key or "jitter" in key}
    model = tiny_model(name, **chances)
    modules = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    found = []
    if any(module.p > 0 for module in modules):
        found.append("module")
    for module in modules:
        module.p = 0.0
    one, again, two = (_logits(model, _tokens(), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    if not torch.equal(one, two):
        found.append("functional")
    return tuple(found)


def _shared_after(name: str) -> str:
    """The child with parameters that every block runs after its experts, on the tensor that the block got."""
    model = tiny_model(name)
    found = {block: "" for block, module in model.named_modules() if "experts" in dict(module.named_children())}
    runs = []  # (block, child, what it got), in order

    def note(block, child):
        return lambda _module, args: runs.append((block, child, args))

    for block in found:
        module = model.get_submodule(block)
        module.register_forward_pre_hook(note(block, ""))
        for child, below in module.named_children():
            if next(below.parameters(), None) is not None:
                below.register_forward_pre_hook(note(block, child))
    _logits(model, _tokens())
    for block in found:
        calls = [(child, args) for at, child, args in runs if at == block]
        (_, given), order = calls[0], [child for child, _ in calls]
        for child, args in calls[order.index("experts") + 1 :]:
            if len(args) == len(given) == 1 and args[0] is given[0] and order.count(child) == 1:
                found[block] = child
    names = set(found.values()) or {""}
    assert len(names) == 1, found
    return names.pop()

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dtensor_5d.ops import WeightGradients, make_deferrable, restore
from tests.families.tiny import FAMILIES, VOCAB, tiny_model

QUICK = ["llama", "gpt2", "opt", "gemma3_text", "qwen3_moe", "gpt_oss", "llama4_text"]


def _gradients(model, store=None, micro_batches=2):
    model.zero_grad()
    at_once = set()
    for i in range(micro_batches):
        torch.manual_seed(i)
        ids = torch.randint(3, VOCAB, (2, 24))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if store is None:
            loss.backward()
            continue
        with store.deferring(i):
            loss.backward()
    if store is not None:
        at_once = {name for name, p in model.named_parameters() if p.grad is not None}
        for i in range(micro_batches):
            store.run(i)
    return {name: p.grad for name, p in model.named_parameters()}, at_once


def _check(family, experts):
    model = tiny_model(family).train()
    if experts is not None:
        model.set_experts_implementation(experts)
    keys, names = list(model.state_dict()), [n for n, p in model.named_parameters() if p.requires_grad]
    want, _ = _gradients(model)
    store = WeightGradients()
    deferral = make_deferrable(model, store)
    assert list(model.state_dict()) == keys
    assert sorted(deferral.waits + deferral.at_once) == sorted(names)
    plain, _ = _gradients(model)
    deferred, at_once = _gradients(model, store)
    # gemma3n multiplies with one weight twice in a forward, which rounds in another order.
    same = torch.equal if family != "gemma3n_text" else lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    for name in names:
        for got in (plain[name], deferred[name]):
            assert (got is None) == (want[name] is None) and (got is None or same(got, want[name])), name
    assert not at_once & set(deferral.waits) or family in ("gemma3n_text", "jamba"), at_once & set(deferral.waits)
    return deferral


@pytest.mark.parametrize("family", QUICK)
def test_a_model_keeps_every_gradient_bit_for_bit(family):
    deferral = _check(family, "grouped_mm" if family.endswith("moe") else None)
    assert all("norm" in n or "ln_" in n or n.endswith(("bias", "sinks")) for n in deferral.at_once)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(QUICK)))
def test_every_family_keeps_every_gradient_bit_for_bit(family):
    _check(family, None)


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_experts_in_their_other_forms(experts):
    model = tiny_model("mixtral").train()
    model.set_experts_implementation(experts)
    want, _ = _gradients(model)
    store = WeightGradients()
    make_deferrable(model, store)
    got, at_once = _gradients(model, store)
    assert all(torch.equal(got[n], want[n]) for n in want)
    # batched_mm copies the weights of each token's experts: more than a view, so that gradient does not wait.
    assert any("experts" in n for n in at_once) == (experts == "batched_mm")


def test_classes_that_scale_shift_or_pad():
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids + 1) * 3.0

    torch.manual_seed(0)
    model = nn.Sequential(Scaled(9, 4, padding_idx=2), nn.Conv1d(4, 4, 1), nn.Bilinear(4, 4, 4))
    store = WeightGradients()
    deferral = make_deferrable(model, store)
    assert deferral.waits == ("0.weight", "2.weight") and "1.weight" in deferral.at_once
    ids = torch.tensor([[0, 1, 4]])
    model[0](ids).sum().backward()
    want, model[0].weight.grad = model[0].weight.grad, None
    with store.deferring(0):
        model[0](ids).sum().backward()
    assert model[0].weight.grad is None and store.run(0) == 1
    assert torch.equal(model[0].weight.grad, want) and want[2].abs().sum() == 0


def test_recomputation_runs_once_and_the_closures_hold_what_it_made():
    calls = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            calls.append(1)
            return x + self.down(torch.relu(self.up(x)))

    torch.manual_seed(0)
    plain = nn.ModuleList([Block(), Block()])
    ours, store = copy.deepcopy(plain), WeightGradients()
    make_deferrable(ours, store)
    x = torch.randn(3, 8, requires_grad=True)

    def run(blocks):
        y = x
        for b in blocks:
            y = checkpoint(b, y, use_reentrant=False)
        return y.square().sum()

    run(plain).backward()
    calls.clear()
    losses = [run(ours), run(ours)]
    for i, loss in enumerate(losses):
        with store.deferring(i):
            loss.backward()
    assert len(calls) == 2 * 2 * 2
    store.run(0)
    assert len(calls) == 2 * 2 * 2
    for a, b in zip(plain.parameters(), ours.parameters()):
        if b.dim() == 2:
            assert torch.equal(a.grad, b.grad)
    store.run(1)


def test_restore_and_copies():
    model, store = nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 4)), WeightGradients()
    make_deferrable(model, store)
    with pytest.raises(ValueError, match=r"2 modules .* already have a store"):
        make_deferrable(model, WeightGradients())
    twin = copy.deepcopy(model)
    twin[0].weight.data.zero_()
    x = torch.randn(2, 4)
    assert twin[0].forward.store is store and twin[1].forward.store is store
    assert torch.equal(twin[0](x), twin[0].bias.expand(2, 4)) and not torch.equal(model[0](x), twin[0](x))
    restore(model)
    assert all("forward" not in m.__dict__ for m in model)
    model[0].forward = own = lambda x: x
    make_deferrable(model, store)
    restore(model)
    assert model[0].forward is own


def test_frozen_and_tied_weights_and_eval():
    model, store = tiny_model("llama", tie_word_embeddings=True), WeightGradients()
    model.model.layers[1].requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_(True)
    want, _ = _gradients(model)
    deferral = make_deferrable(model, store)
    assert not any("layers.1." in n for n in deferral.waits + deferral.at_once)
    got, _ = _gradients(model, store)
    for n, w in want.items():
        assert (got[n] is None) == (w is None)
        if w is not None:
            torch.testing.assert_close(got[n], w, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert model(torch.tensor([[3, 4]])).logits.grad_fn is None


@pytest.mark.parametrize("defer", [False, True])
def test_a_compiled_module_still_defers(defer):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    ids = torch.tensor([[1, 2, 3]])
    ours, store = copy.deepcopy(plain), WeightGradients()
    plain(ids).square().sum().backward()
    make_deferrable(ours, store)
    compiled = torch.compile(ours, backend="aot_eager")
    compiled(ids).square().sum().backward()  # traced while nothing waits
    ours.zero_grad()
    loss = compiled(ids).square().sum()
    if defer:
        with store.deferring(0):
            loss.backward()
        assert store.run(0) == 3
    else:
        loss.backward()
    for a, b in zip(plain.parameters(), ours.parameters()):
        torch.testing.assert_close(a.grad, b.grad)

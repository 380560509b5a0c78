"""Dropout on the tensor axis: equal where ranks do the same, distinct where they do not (C11, T17)."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for
from dtensor_5d.checkpoint.slices import local_part
from tests.families.tiny import VOCAB, tiny_model
from tests.harness import assert_same_gradients, run_ranks
from tests.parity import rows

DROPS = dict(embd_pdrop=0.5, resid_pdrop=0.5, attn_pdrop=0.5, num_hidden_layers=2)


class Masks(TorchFunctionMode):
    """What every dropout kept."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.dropout:
            self.kept.append((args[0] != 0).logical_and(out != 0).detach())
        return out


def _masks(rank, sequence):
    torch.manual_seed(100 + rank)  # every process its own: rank 0's counts
    model = tiny_model("gpt2", attn="eager", **DROPS)
    degrees = Degrees(tp=2)
    run = parallelize(model, plan_for(model, degrees, sequence_parallel=sequence), build_mesh(degrees, "cpu"))
    before = torch.get_rng_state()
    with Masks() as seen:
        run.step(rows(0, 2, 8, VOCAB))
    untouched = torch.equal(before, torch.get_rng_state())
    replicas = {n: local_part(p.grad).clone() for n, p in run.named_parameters() if "ln_" in n or "wpe" in n}
    run.logits(rows(0, 1, 8, VOCAB))  # eval draws nothing
    return seen.kept, replicas, untouched and torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("sequence", [True, False])
def test_t17_masks_are_equal_on_the_same_tokens_and_distinct_on_others(sequence):
    (kept, replicas, untouched), (kept_1, replicas_1, untouched_1) = run_ranks(2, _masks, sequence)
    assert untouched and untouched_1
    embedding, *layers = [torch.equal(a, b) for a, b in zip(kept, kept_1)]
    assert embedding, "the tokens are whole before the layers"
    # attention weights (other heads), output of attention, output of the MLP; twice
    assert layers == [False, not sequence, not sequence] * 2
    assert [mask.shape[1] for mask in kept[2:4]] == [4 if sequence else 8] * 2
    assert all(torch.equal(replicas[name], replicas_1[name]) for name in replicas)


def _whole(rank):
    """Dropout inside attention that stays whole under sequence parallelism."""
    torch.manual_seed(rank)
    model = tiny_model("gpt2", attn="eager", **DROPS)
    degrees = Degrees(tp=2)
    rules = {"tp": {"transformer.h.*.attn": "replicate"}}
    run = parallelize(model, plan_for(model, degrees, rules=rules), build_mesh(degrees, "cpu"))
    with Masks() as seen:
        run.step(rows(0, 2, 8, VOCAB))
    return seen.kept, {n: p.grad.clone() for n, p in run.named_parameters() if ".attn." in n}


def test_attention_that_stays_whole_draws_the_same_on_all_ranks():
    (kept, grads), (kept_1, grads_1) = run_ranks(2, _whole)
    # embedding; attention weights and output of attention, whole; output of the MLP, a part of the tokens; twice
    assert [torch.equal(a, b) for a, b in zip(kept, kept_1)] == [True, *[True, True, False] * 2]
    assert not torch.equal(kept[1], kept[4]), "each layer draws its own"
    assert all(torch.equal(grads[name], grads_1[name]) for name in grads)


def _jitter(rank, sequence):
    torch.manual_seed(rank)
    model = tiny_model("mixtral", router_jitter_noise=0.3, num_hidden_layers=2)
    degrees = Degrees(tp=2)
    run = parallelize(model, plan_for(model, degrees, sequence_parallel=sequence), build_mesh(degrees, "cpu"))
    given, drawn = [], []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: given.append(args[0].detach().flatten(0, 1).clone()))
        layer.mlp.gate.register_forward_pre_hook(lambda _, args: drawn.append(args[0].detach().clone()))
    run.step(rows(0, 2, 8, VOCAB))
    return [jittered / before for jittered, before in zip(drawn, given)], run.full_gradients()


@pytest.mark.parametrize("sequence", [True, False])
def test_router_jitter_is_equal_on_the_same_tokens_and_distinct_on_others(sequence):
    (noise, grads), (noise_1, grads_1) = run_ranks(2, _jitter, sequence)
    assert [len(n) for n in noise] == [8 if sequence else 16] * 2  # tokens
    for own, other in zip(noise, noise_1):
        assert torch.equal(own, other) is not sequence
        assert (own - 1).abs().max() > 0.2  # up to 0.3
    assert_same_gradients(grads, grads_1, tol=0.0)


def _repeated(rank):
    """The same window twice, from the same seed: the same gradients."""
    model = tiny_model("gpt2", **DROPS)
    degrees = Degrees(tp=2)
    run = parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))
    run.step(rows(0, 2, 8, VOCAB))
    return run.full_gradients()


def test_a_run_repeats():
    assert_same_gradients(run_ranks(2, _repeated)[0], run_ranks(2, _repeated)[1], tol=0.0)

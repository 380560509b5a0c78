"""Balancing functions against transformers' own and against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from dtensor_5d.expert.balance import expert_load, load_balancing_loss, update_bias
from tests.harness import run_ranks

LAYERS, EXPERTS, TOP = 3, 8, 2


def _logits(tokens, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, EXPERTS, generator=g).requires_grad_() for _ in range(LAYERS))


def test_loss_of_one_process_is_that_of_transformers():
    for mask in (None, torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])):
        ours, theirs = _logits(8), _logits(8)
        a = load_balancing_loss(ours, TOP, mask=mask)
        b = load_balancing_loss_func(theirs, EXPERTS, TOP, mask)
        a.backward(), b.backward()
        torch.testing.assert_close(a, b)
        for x, y in zip(ours, theirs):
            torch.testing.assert_close(x.grad, y.grad)


def _loss_on_ranks(rank, sizes):
    whole = _logits(sum(sizes))
    mask = (torch.arange(sum(sizes)) % 3 > 0).long()
    want = load_balancing_loss_func(whole, EXPERTS, TOP, mask.view(1, -1))
    want.backward()
    mine = [layer.detach().split(sizes)[rank].requires_grad_() for layer in whole]
    got = load_balancing_loss(mine, TOP, groups=[dist.group.WORLD], mask=mask.split(sizes)[rank])
    got.backward()
    torch.testing.assert_close(got, want)
    for part, layer in zip(mine, whole):
        torch.testing.assert_close(part.grad, layer.grad.split(sizes)[rank])


@pytest.mark.parametrize("sizes", [(6, 6), (3, 9), (0, 12)])
def test_loss_over_ranks_is_that_of_one_process(sizes):
    run_ranks(2, _loss_on_ranks, sizes)


def test_loss_without_tokens_is_zero():
    assert load_balancing_loss(_logits(4), TOP, mask=torch.zeros(4)).item() == 0.0
    assert load_balancing_loss(_logits(0), TOP).item() == 0.0


def test_padding_is_no_load():
    index = torch.tensor([[[0, 1], [2, 3]], [[0, 2], [0, 3]]])
    real = torch.tensor([[1, 0], [1, 0]])
    assert expert_load(index, 4, real).tolist() == [2, 1, 1, 0]
    assert expert_load(index, 4).tolist() == [3, 1, 2, 2]


def _bias_on_ranks(rank):
    g = torch.Generator().manual_seed(1)
    index = torch.randint(0, EXPERTS, (16, 2), generator=g)
    alone = update_bias(torch.linspace(-1, 1, EXPERTS), expert_load(index, EXPERTS), 0.1)
    bias = torch.linspace(-1, 1, EXPERTS)
    # four micro-batches, two on each rank, counted together
    load = sum(expert_load(part, EXPERTS) for part in index.chunk(4)[2 * rank : 2 * rank + 2])
    assert update_bias(bias, load, 0.1, [dist.group.WORLD]) is bias
    assert torch.equal(bias, alone)
    assert abs(bias.mean().item()) < 1e-7


def test_bias_is_that_of_one_process_however_the_window_is_cut():
    run_ranks(2, _bias_on_ranks)


def test_bias_moves_against_the_load():
    bias = update_bias(torch.zeros(3), torch.tensor([9, 0, 3]), 0.5)  # mean 4: the first has too much, the others less
    torch.testing.assert_close(bias, torch.tensor([-2 / 3, 1 / 3, 1 / 3]))
    for _ in range(5):
        update_bias(bias, torch.tensor([4, 4, 4]), 0.5)
    torch.testing.assert_close(bias, torch.tensor([-2 / 3, 1 / 3, 1 / 3]))
    with pytest.raises(ValueError, match="one number for each expert"):
        update_bias(torch.zeros(3), torch.zeros(4), 0.1)

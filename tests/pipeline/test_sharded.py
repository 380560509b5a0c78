"""`PipelineParallel`, then torch's own `fully_shard`: against one process, and what is refused."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM

from dtensor_5d import PlanError
from dtensor_5d.adapters.decoder import find_decoder
from dtensor_5d.loss import token_loss_sum
from dtensor_5d.pipeline import PipelineParallel
from dtensor_5d.tensor import BlockInput, ColwiseParallel, HeadParallel, RowwiseParallel, VocabularyEmbedding
from tests.families.tiny import VOCAB, tiny_config, tiny_model
from tests.harness import assert_same_gradients, run_ranks
from tests.parity import rows
from tests.traces import Trace

MESH = (2, 2)  # pp, dp


def _sharded(model, mesh, reshard=True, schedule="1f1b", micro=2, **more):
    """reshard: of every layer, or one for each."""
    layers = find_decoder(model).layers
    model = parallelize_module(model, mesh["pp"], PipelineParallel(schedule=schedule, microbatches=micro))
    for number, layer in enumerate(model.get_submodule(layers)):
        one = reshard[number % len(reshard)] if isinstance(reshard, tuple) else reshard
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=one, **more)
    return fully_shard(model, mesh=mesh["dp"], **more)


def _window(step, data):
    """What a data rank has; the second one has other rows and one batch more."""
    first = rows(10 * step + data, 3 + data, 8, VOCAB, supervised=(0.9, 0.4)[data % 2])
    return [first] if data % 2 == 0 else [first, rows(10 * step + 5, 1, 11, VOCAB)]


def _tokens(window):
    return sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)


def _one_process(model, windows, divisors):
    """Adds the gradients of all windows, each divided; the divided losses."""
    losses = []
    for window, divisor in zip(windows, divisors):
        total = 0.0
        for batch in window:
            labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            loss = token_loss_sum(model(batch["input_ids"], use_cache=False).logits, labels) / divisor
            loss.backward()
            total += loss.item()
        losses.append(total)
    return losses


def _full(model, what):
    found = {}
    for name, p in model.named_parameters():
        value = getattr(p, what)
        found[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def _compare(got, reference, what, tied):
    want = {n: getattr(p, what) for n, p in reference.named_parameters()}
    names = {n: n if n in want else tied[n] for n in got}
    assert got
    assert_same_gradients(got, {n: want[names[n]] for n in got}, tol=1e-5)


def _parity(rank, family, options, reshard, schedule, summed):
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("pp", "dp"))
    model = tiny_model(family, **options)
    reference = copy.deepcopy(model)
    tied = {name: group[0] for group in find_decoder(model).ties for name in group}
    model = _sharded(model, mesh, reshard, schedule)
    data = mesh.get_local_rank("dp")
    if summed:  # one mean over the tokens of all: reductions that only sum
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        windows = [_window(step, r) for r in range(MESH[1])]
        total = sum(map(_tokens, windows))
        loss = model.step(windows[data], tokens=total if summed else None)
        divisors = [total if summed else MESH[1] * _tokens(w) for w in windows]
        want = _one_process(reference, windows, divisors)[data] * (1 if summed else MESH[1])
        assert abs(loss.item() - want) < 1e-5 * want
        _compare(_full(model, "grad"), reference, "grad", tied)
        for one in (optim, other):
            one.step()
            one.zero_grad()
    _compare({n: p.detach() for n, p in _full(model, "data").items()}, reference, "data", tied)


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    "family, options, reshard, schedule, summed",
    [
        ("llama", {}, True, "1f1b", False),
        ("llama", {}, False, "zbv", True),
        ("gpt2", TIED, False, "1f1b", False),
        ("gpt2", TIED, True, "zbv", False),
        ("llama", TIED, (True, False), "interleaved", True),
        pytest.param("llama", {}, False, "1f1b", False, marks=pytest.mark.slow),
        pytest.param("llama", {}, True, "zbv", False, marks=pytest.mark.slow),
        pytest.param("gpt2", TIED, True, "1f1b", True, marks=pytest.mark.slow),
        pytest.param("gpt2", TIED, False, "zbv", True, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {}, True, "zb-h1", False, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_those_of_one_process(family, options, reshard, schedule, summed):
    run_ranks(4, _parity, family, options, reshard, schedule, summed)


def _around(rank):
    """Units around the layers, and one with the first and the last module of a model with tied weights."""
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("pp", "dp"))
    model = tiny_model("llama", **TIED)
    reference = copy.deepcopy(model)
    model = parallelize_module(model, mesh["pp"], PipelineParallel(schedule="zbv", microbatches=2))
    fully_shard([model.model.embed_tokens, model.lm_head], mesh=mesh["dp"], reshard_after_forward=True)
    fully_shard(model.model, mesh=mesh["dp"], reshard_after_forward=True)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
    windows = [_window(0, r) for r in range(MESH[1])]
    for _ in range(2):
        model.zero_grad()
        model.step(windows[mesh.get_local_rank("dp")])
    _one_process(reference, windows, [MESH[1] * _tokens(w) for w in windows])
    _compare(_full(model, "grad"), reference, "grad", {"lm_head.weight": "model.embed_tokens.weight"})


def test_units_whose_forward_is_not_that_of_one_stage():
    run_ranks(4, _around)


def _more_axes(rank, shape, sharded):
    """Replicas of shards, or a tensor axis inside: styles of other axes stand between the two."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    model = tiny_model("llama")
    reference = copy.deepcopy(model)
    model = parallelize_module(model, mesh["pp"], PipelineParallel(schedule="zbv", microbatches=2))
    mlp = "model.layers.*.mlp"
    styles = {mlp: BlockInput(), f"{mlp}.gate_proj": ColwiseParallel(own_input=False),
              f"{mlp}.up_proj": ColwiseParallel(own_input=False), f"{mlp}.down_proj": RowwiseParallel(),
              "model.embed_tokens": VocabularyEmbedding(), "lm_head": HeadParallel()}  # fmt: skip
    if shape[3] > 1:
        model = parallelize_module(model, mesh["tp"], styles)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh[sharded])
    fully_shard(model, mesh=mesh[sharded])
    windows = [_window(0, r) for r in range(shape[1] * shape[2])]
    model.step(windows[mesh.get_local_rank("replicate") * shape[2] + mesh.get_local_rank("shard")])
    _one_process(reference, windows, [len(windows) * _tokens(w) for w in windows])
    _compare(_full(model, "grad"), reference, "grad", {})


@pytest.mark.parametrize("shape, sharded", [
    ((2, 1, 1, 2), "shard"),  # a V: one rank has both ends, the other stand-ins for them
    pytest.param((2, 2, 1, 1), ("replicate", "shard"), marks=pytest.mark.slow),
    pytest.param((2, 2, 2, 1), ("replicate", "shard"), marks=pytest.mark.slow),
    pytest.param((2, 1, 2, 2), "shard", marks=pytest.mark.slow),
])  # fmt: skip
def test_beside_other_axes(shape, sharded):
    run_ranks(torch.Size(shape).numel(), _more_axes, shape, sharded, timeout=90.0)


def _from_meta(rank):
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("pp", "dp"))
    reference = tiny_model("llama")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model = _sharded(model, mesh)
    windows = [_window(0, r) for r in range(MESH[1])]
    mine = windows[mesh.get_local_rank("dp")]
    with pytest.raises(PlanError, match="on meta"):
        model.step(mine)
    model.to_empty(device="cpu")
    whole = dict(reference.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(whole[name].detach(), p.device_mesh, p.placements))
    model.model.rotary_emb = copy.deepcopy(reference.model.rotary_emb)  # its buffers are not in a state dict
    model.step(mine)
    _one_process(reference, windows, [MESH[1] * _tokens(w) for w in windows])
    _compare(_full(model, "grad"), reference, "grad", {})


def test_cut_and_sharded_on_meta():
    run_ranks(4, _from_meta)


def _counts(rank, reshard):
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("pp", "dp"))
    model = _sharded(tiny_model("llama"), mesh, reshard)
    model.step(rows(0, 4, 8, VOCAB))
    with Trace() as trace:
        model.step(rows(0, 4, 8, VOCAB))
    return trace.count("gather"), trace.count("reduce_scatter")


@pytest.mark.parametrize("reshard", [True, False])
def test_the_schedule_gathers_as_the_user_has_said(reshard):
    """Two layers and the root, 2 micro-batches: F and I of a layer gather it, or its first F does; the root stays."""
    gathers = 1 + 2 * (2 * 2 if reshard else 1)
    assert run_ranks(4, _counts, reshard) == [(gathers, 3)] * 4


def _narrow(rank, pp):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    layers = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (pp, 1), mesh_dim_names=("pp", "dp"))
    model = tiny_model("llama")
    if pp > 1:
        model = parallelize_module(model, mesh["pp"], PipelineParallel(microbatches=1))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=layers)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    batch = rows(0, 2, 8, VOCAB)
    loss = model.step(batch).item() if pp > 1 else _one_process(model, [[batch]], [_tokens([batch])])[0]
    return loss, _full(model, "grad")


def test_a_policy_of_dtypes_is_what_it_is_without_a_pipeline():
    ((loss, want),) = run_ranks(1, _narrow, 1)
    for found, got in run_ranks(2, _narrow, 2):
        assert abs(found - loss) < 1e-5 * loss and got
        assert all(g.dtype == torch.float32 for g in got.values())
        assert_same_gradients(got, {n: want[n] for n in got}, tol=1e-5)


def _refused(rank):
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("pp", "dp"))
    data = mesh.get_local_rank("dp")
    good = _window(0, data)
    with pytest.raises(PlanError, match="apply PipelineParallel first, then fully_shard"):
        parallelize_module(fully_shard(tiny_model("llama"), mesh=mesh["dp"]), mesh["pp"], PipelineParallel())
    open_root = parallelize_module(tiny_model("llama"), mesh["pp"], PipelineParallel())
    for layer in open_root.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    with pytest.raises(PlanError, match="and not on the model"):
        open_root.step(good)
    too_wide = parallelize_module(tiny_model("llama"), mesh["pp"], PipelineParallel())
    fully_shard(too_wide, mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(PlanError, match="has other stages than"):
        too_wide.step(good)
    policies = [MixedPrecisionPolicy(param_dtype=t) for t in (torch.bfloat16, torch.float64)]
    mixed = _sharded(tiny_model("llama"), mesh, mp_policy=policies[mesh.get_local_rank("pp")])
    with pytest.raises(PlanError, match="an mp_policy on some stages"):
        mixed.step(good)
    model = _sharded(tiny_model("llama"), mesh)
    bad = rows(0, 2, 8, VOCAB)
    bad["input_ids"][0, 0] = VOCAB
    with pytest.raises(PlanError, match=f"id {VOCAB}"):
        model.step(bad if rank == 3 else good)
    with pytest.raises(PlanError, match="mine"):
        model.step(good, loss=functools.partial(_fails, data))
    model.zero_grad()
    reference = tiny_model("llama")
    model.step(good)
    windows = [_window(0, r) for r in range(MESH[1])]
    _one_process(reference, windows, [MESH[1] * _tokens(w) for w in windows])
    _compare(_full(model, "grad"), reference, "grad", {})


def _other_settings(rank):
    """Another on the second data rank; of one stage only, where the other stage cannot see it."""
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("pp", "dp"))
    data = mesh.get_local_rank("dp")
    window = _window(0, data)
    mixed = _sharded(tiny_model("llama"), mesh, schedule=["1f1b", "gpipe"][data])
    with pytest.raises(PlanError, match="schedule on rank 1 of the data axis"):
        mixed.step(window)
    words = "fully_shard .* on rank 1 of the data axis"
    mixed = _sharded(tiny_model("llama"), mesh, reshard=(data == 0, True, True, True))
    with pytest.raises(PlanError, match=words):
        mixed.step(window)
    mixed = _sharded(tiny_model("llama"), mesh)
    mixed.model.layers[0].requires_grad_(data == 0)
    with pytest.raises(PlanError, match=words):
        mixed.step(window)
    model, reference = tiny_model("llama"), tiny_model("llama")
    model = _sharded(model, mesh, micro=(2, 4)[data])  # a rank with fewer runs empty ones
    model.step(window)
    windows = [_window(0, r) for r in range(MESH[1])]
    _one_process(reference, windows, [MESH[1] * _tokens(w) for w in windows])
    _compare(_full(model, "grad"), reference, "grad", {})


def test_settings_that_are_not_the_same_on_all_data_ranks_are_refused_on_every_rank():
    run_ranks(4, _other_settings)


def _fails(data, logits, labels):
    if data == 1:
        raise PlanError("mine")
    return token_loss_sum(logits, labels)


def test_what_one_rank_cannot_run_is_every_ranks_error_and_the_next_step_is_exact():
    run_ranks(4, _refused)

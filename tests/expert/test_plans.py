"""Plans with the expert axis: the rules they hold, what they leave to the tensor axis, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

from dtensor_5d import Degrees, ExpertParallel, PlanError, build_mesh, parallelize, plan_for
from dtensor_5d.expert.problems import Problems
from tests.families.tiny import tiny_config, tiny_model
from tests.harness import fails_on_ranks, run_ranks

EP2 = Degrees(dp_shard=2, ep=2)
EXPERTS = "model.layers.*.mlp.experts"


def test_a_plan_shows_what_happens_to_experts_and_what_is_beside_them():
    plan = plan_for(tiny_config("qwen2_moe"), Degrees(dp_shard=2, tp=2, ep=4))
    assert plan.rules["ep"] == {"model.layers.*.mlp.experts": "dispatch"}
    assert plan.rules["dp"]["model.layers.*.mlp.experts"] == "experts"
    tp = plan.rules["tp"]
    assert not any(".experts" in pattern for pattern in tp)
    assert tp["model.layers.*.mlp.gate"] == tp["model.layers.*.mlp.shared_expert_gate"] == "sequence"
    assert tp["model.layers.*.mlp.shared_expert"] == "block"
    assert type(plan).from_json(plan.to_json()) == plan
    assert "dispatch" in str(plan)


def test_blocks_are_named_where_experts_take_no_indices():
    plan = plan_for(tiny_config("llama4_text"), Degrees(dp_shard=2, ep=2))
    assert set(plan.rules["ep"]) == {"model.layers.1.feed_forward", "model.layers.3.feed_forward"}
    assert {p for p, s in plan.rules["dp"].items() if s == "experts"} == {"model.layers.*.feed_forward.experts"}


def test_without_the_axis_experts_have_ranks_of_their_own_beside_tp_only():
    """C6: with ep = etp = 1 they are whole on every rank, sharded over dp_shard x cp x tp as units of their own."""
    plan = plan_for(tiny_config("qwen3_moe"), Degrees(dp_shard=2, tp=2))
    assert plan.rules["ep"] == {EXPERTS: "dispatch"} and plan.rules["dp"][EXPERTS] == "experts"
    assert not any(".experts" in pattern or pattern == "model.layers.*.mlp" for pattern in plan.rules["tp"])
    plan = plan_for(tiny_config("qwen3_moe"), Degrees(dp_shard=2, cp=2))
    assert "ep" not in plan.rules and "experts" not in plan.rules["dp"].values()


@pytest.mark.parametrize(
    ("family", "model", "degrees", "options", "match"),
    [
        ("llama", {}, Degrees(dp_shard=2, ep=2), {}, r"ep=2, etp=1 for llama: .*this model is dense"),
        ("qwen3_moe", {"num_experts": 6}, Degrees(dp_shard=4, ep=4), {}, r"ep=4 .* with 6 experts: .*\[1, 2, 3, 6\]"),
        ("qwen3_moe", {"moe_intermediate_size": 45}, Degrees(dp_shard=2, etp=2), {}, "inner size of 45: etp must"),
        ("qwen3_moe", {}, Degrees(dp_shard=2), {"dispatch": "all_gather"}, "dispatch='all_gather' with ep=1"),
        ("qwen3_moe", {}, Degrees(dp_shard=2), {"capacity": 1.5}, "capacity=1.5 with ep=1"),
        ("qwen3_moe", {}, Degrees(dp_shard=2, ep=2), {"capacity": 1.5, "dispatch": "two_step"}, "capacity needs"),
        ("qwen3_moe", {}, Degrees(dp_shard=2, ep=2), {"rules": {"ep": {"model.layers.*.self_attn": "dispatch"}}},
         "must hold fused experts"),
        ("qwen3_moe", {}, Degrees(dp_shard=2, ep=2), {"rules": {"ep": {"model.layers.*.mlp.experts": "row"}}},
         "style 'row' for model.layers.0.mlp.experts on the expert axis"),
        ("qwen3_moe", {}, EP2, {"rules": {"ep": {EXPERTS: SequenceParallel()}}}, "must be 'dispatch' or an Expert"),
        ("qwen3_moe", {}, EP2, {"rules": {"ep": {EXPERTS: ExpertParallel()}}, "capacity": 1.5},
         "has capacity=None, the plan capacity=1.5"),
        ("qwen3_moe", {}, EP2, {"rules": {"ep": {EXPERTS: ExpertParallel()}}, "dispatch": "all_gather"},
         "has dispatch='all_to_all', the plan dispatch='all_gather'"),
        ("qwen3_moe", {}, EP2, {"rules": {"ep": {EXPERTS: ExpertParallel(dispatch="two_step", ranks_per_node=3)}}},
         "ranks_per_node=3 must divide ep=2"),
        ("qwen3_moe", {}, EP2, {"rules": {"ep": {EXPERTS: ExpertParallel(problems=Problems())}}}, "leave problems at"),
        ("deepseek_v3", {}, EP2, {"rules": {"ep": {EXPERTS: ExpertParallel(overlap="shared_experts")}}},
         "overlap is what the model's own ranks, run and family say"),
        ("qwen3_moe", {}, EP2, {"capacity": float("inf")}, "must be a finite factor"),
        *(("qwen3_moe", {}, EP2, {"rules": {"dp": {EXPERTS: style}}}, f"'{style}' for .*experts on the data axis")
          for style in ("root", "unit", "unit:all", "unit/2")),
        ("qwen3_moe", {}, EP2, {"rules": {"dp": {"model.layers.*.self_attn": "experts"}}}, "use 'unit'"),
        *(("qwen3_moe", {}, Degrees(tp=2, ep=2), {"rules": {"tp": {name: style}}}, f"{style}.* on the tensor axis")
          for name, style in ((EXPERTS + ".gate_up_proj", "packed_column/1/2"), (EXPERTS, "replicate"),
                              ("model.layers.*.mlp", "block"), ("model.layers.*.mlp", "replicate"))),
        ("qwen3_moe", {}, Degrees(dp_shard=2), {"rules": {"ep": {"model.layers.*.mlp.experts": "dispatch"}}},
         "rules for ep with ep=1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_when_the_plan_is_made(family, model, degrees, options, match):
    with pytest.raises(PlanError, match=match):
        plan_for(tiny_config(family, num_hidden_layers=2, **model), degrees, **options)


def test_ep_that_does_not_divide_its_ranks_is_refused_with_both_numbers():
    with pytest.raises(PlanError, match=r"ep=4 x etp=1 = 4: .* = 2 x 1 x 1 = 2"):
        Degrees(dp_shard=2, ep=4)


def _on_nodes(rank, ranks_per_node):
    degrees = Degrees(dp_shard=4, ep=4)
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    mesh = build_mesh(degrees, "cpu", ranks_per_node=ranks_per_node)
    parallelize(model, plan_for(model, degrees, dispatch="two_step"), mesh)


@pytest.mark.parametrize(
    ("nodes", "match"),
    [(None, r"dispatch='two_step': .*build_mesh\(..., ranks_per_node=n\)"),
     (3, "on nodes of 3 ranks: the 3 ranks of ep on a node must divide ep=4")],
)  # fmt: skip
def test_two_steps_need_nodes_that_fit(nodes, match):
    fails_on_ranks(4, _on_nodes, nodes, error=PlanError, match=match)


def _placements(rank, degrees, family):
    model = tiny_model(family, num_hidden_layers=2)
    run = parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))
    found = {}
    for name, p in run.named_parameters():
        if ".experts." in name:
            assert isinstance(p, DTensor)
            found[name.rpartition(".")[2]] = (p.device_mesh.mesh_dim_names, p.placements, tuple(p._local_tensor.shape))
    return found


def test_where_experts_lie():
    (found, *_) = run_ranks(4, _placements, Degrees(dp_shard=4, ep=2, etp=2), "gpt_oss")
    names = ("efsdp", "ep", "etp")
    assert {mesh for mesh, _, _ in found.values()} == {names}
    inner = {name: placements[2] for name, (_, placements, _) in found.items()}
    assert inner == {
        "gate_up_proj": Shard(2), "gate_up_proj_bias": Shard(1), "down_proj": Shard(1), "down_proj_bias": Replicate(),
    }  # fmt: skip
    assert all(placements[1] == Shard(0) for _, placements, _ in found.values())
    (found, *_) = run_ranks(4, _placements, Degrees(dp_shard=2, tp=2), "qwen3_moe")
    assert {(mesh, shape[0]) for mesh, _, shape in found.values()} == {(("efsdp", "ep"), 2)}  # 8 experts on 4 ranks
    (found, *_) = run_ranks(4, _placements, Degrees(dp_replicate=2, dp_shard=2, ep=2), "qwen3_moe")
    for mesh, placements, shape in found.values():
        assert mesh == ("dp_replicate", "efsdp", "ep") and placements[0] == Replicate() and shape[0] == 4


def _own_style(rank):
    """A style of the user's own in place of a name."""
    degrees = Degrees(dp_shard=2, ep=2)
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    rules = {"ep": {"model.layers.*.mlp.experts": ExpertParallel(transport="direct")}}
    run = parallelize(model, plan_for(model, degrees, rules=rules), build_mesh(degrees, "cpu"))
    return run.logits({"input_ids": torch.arange(10).view(1, 10) + 10 * rank})


def test_a_style_of_ones_own():
    want = tiny_model("qwen3_moe", num_hidden_layers=2).eval()
    for rank, got in enumerate(run_ranks(2, _own_style)):
        with torch.no_grad():
            torch.testing.assert_close(got, want(torch.arange(10).view(1, 10) + 10 * rank, use_cache=False).logits)

"""A schedule that somebody has written by hand: from a CSV file to gradients, and what is refused."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_5d import Degrees, Plan, PlanError, build_mesh, parallelize, plan_for
from dtensor_5d.options import Options
from dtensor_5d.pipeline import PipelineParallel
from dtensor_5d.schedule import Schedule, build
from tests.families.tiny import VOCAB, tiny_config, tiny_model
from tests.harness import assert_same_gradients, run_ranks
from tests.parity import Case, check_parity, rows

# Three forwards first; the weights of micro-batches 0 and 1 wait. Empty cells as in torch's files.
OWN = "0F0,0F1,0F2,0I0,,0I1,0W0,0B2,0W1\n,1F0,1I0,1F1,1B1,1W0,1F2,1I2,1W2\n"
# Stage 0 on rank 1, stages 1 and 2 on rank 0.
UNEVEN = "1F0,2F0,2B0,1F1,1I0,2F1,2I1,1B1,1W0,2W1\n0F0,0F1,0B0,0B1\n"
TWICE = build("dualpipe", ranks=2, microbatches=4).to_csv()
DEADLOCK = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"


@pytest.mark.parametrize("text, micro, degrees", [
    (OWN, 3, Degrees(pp=2)), (UNEVEN, 2, Degrees(pp=2)), (OWN, 3, Degrees(pp=2, dp_shard=2)),
], ids=["own", "uneven", "sharded"])  # fmt: skip
def test_gradients_equal_those_of_one_process(text, micro, degrees, tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(text)
    check_parity(Case("llama", degrees, {"schedule": str(path), "microbatches": micro}))


def test_a_plan_holds_the_table_and_not_the_path(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(OWN)
    config = tiny_config("llama")
    plan = plan_for(config, Degrees(pp=2), schedule=path, microbatches=3)
    path.unlink()
    assert Plan.from_json(plan.to_json()) == plan == plan_for(config, Degrees(pp=2), schedule=OWN, microbatches=3)
    assert "schedule=a table of 2 ranks" in str(plan)
    assert Options(schedule=Schedule.from_csv(OWN)) == Options(schedule=OWN)
    assert plan.options.settled(2).schedule == plan.options.schedule
    # What a file says of messages and parameters is made anew.
    from dtensor_5d.schedule import lower

    assert Options(schedule=lower(build("1f1b", ranks=2, microbatches=2)).to_csv()).schedule.count("SEND") == 0


@pytest.mark.parametrize(
    "text, degrees, options, words, cell",
    [
        (DEADLOCK, 2, {"microbatches": 2}, "nothing may wait in a circle", ">0B0<"),
        (OWN.replace(",0B2", ""), 2, {"microbatches": 3}, "missing: 0B2", "0W1 >end<"),
        (OWN.replace("1W2", "1W1"), 2, {"microbatches": 3}, "W of stage 1, micro-batch 1 comes once", ">1W1<"),
        (OWN.replace("1F2", "1X2"), 2, {"microbatches": 3}, "1X2", "rank 1, cell 6"),
        (OWN, 4, {"microbatches": 3}, "pp=4 with a schedule of 2 ranks", "rank 1: 1F0"),
        (OWN, 2, {"microbatches": 2}, "2 micro-batches with a schedule of 3", "rank 0: 0F0 0F1 0F2"),
        (OWN, 2, {"microbatches": 3, "chunks": 2}, "chunks=2 with a schedule of 1 stages", "rank 0: 0F0"),
        (OWN.replace("\n,", "\n,\n,"), 3, {"microbatches": 3}, "a rank that does nothing", "rank 2: 1F0"),
        (TWICE, 2, {"microbatches": 4}, "2 copies of the model", "use schedule='dualpipev'"),
        (OWN, 2, {"microbatches": 3, "layers_per_stage": [1, 1, 2]}, "2 numbers", "add up"),
        ("no/such/file.csv", 2, {}, "cannot be read", "no/such/file.csv"),
        (7, 2, {}, "schedule=7", "a path that ends in .csv"),
        (OWN, 1, {"microbatches": 3}, "schedule='a table' with pp=1", "give pp a degree"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_the_table(text, degrees, options, words, cell):
    with pytest.raises(PlanError) as caught:
        plan_for(tiny_config("llama"), Degrees(pp=degrees), schedule=text, **options)
    assert words in str(caught.value) and cell in str(caught.value), caught.value


def _other_windows(rank):
    model = tiny_model("llama")
    plan = plan_for(model, Degrees(pp=2), schedule=OWN, microbatches=1)
    run = parallelize(model, plan, build_mesh(Degrees(pp=2), "cpu"))
    three = [rows(i, 2, 8, VOCAB) for i in range(3)]
    for wrong in (three[:2], three[0]):
        with pytest.raises(PlanError, match=r"with a schedule of 3(.|\n)*rank 1: 1F0"):
            run.step(wrong)
    run.step(three)
    assert run.evaluate(three[:2])[1] > 0
    return run.full_gradients()


def _alone(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    style = PipelineParallel(schedule=Schedule.from_csv(OWN), microbatches=3)
    model = parallelize_module(tiny_model("llama"), mesh["pp"], style)
    three = [rows(i, 2, 8, VOCAB) for i in range(3)]
    with pytest.raises(PlanError, match=r"9 micro-batches with a schedule of 3"):
        model.step(three)
    whole = {key: value.repeat(3, 1) for key, value in three[0].items()}
    model.step(whole)
    return {n: p.grad for n, p in model.named_parameters()}


def test_a_window_of_other_length_is_every_ranks_error_and_the_next_step_is_exact():
    three = [rows(i, 2, 8, VOCAB) for i in range(3)]
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in three)
    want = tiny_model("llama")
    for batch in three:
        want(**batch, use_cache=False, num_items_in_batch=tokens).loss.backward()
    for got in run_ranks(2, _other_windows):
        assert_same_gradients(got, {n: p.grad for n, p in want.named_parameters()}, tol=1e-5)
    want = tiny_model("llama")
    want(**three[0], use_cache=False).loss.backward()
    for got in run_ranks(2, _alone):
        assert got
        assert_same_gradients(got, {n: dict(want.named_parameters())[n].grad for n in got}, tol=1e-5)

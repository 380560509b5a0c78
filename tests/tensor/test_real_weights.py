"""SmolLM2-135M, 9 query and 3 kv heads, on tp 3."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for
from tests.checkpoint.layouts import differing, on_meta
from tests.checkpoint.test_real_weights import contents
from tests.harness import run_ranks
from tests.pretrained_model import TEXT, smollm2  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.pretrained, pytest.mark.timeout(300)]


def _reads_and_writes(rank, folder, out, ids):
    model = on_meta(AutoConfig.from_pretrained(folder))
    degrees = Degrees(tp=3)
    run = parallelize(model, plan_for(model, degrees), build_mesh(degrees, "cpu"))
    run.load_pretrained(folder)
    loss, _ = run.evaluate([{"input_ids": ids, "labels": ids}])
    tokens = run.logits({"input_ids": ids})[0].argmax(-1)
    run.save_pretrained(out)
    return loss, tokens


def test_smollm2_on_three_ranks(smollm2, tmp_path):  # noqa: F811
    ids = AutoTokenizer.from_pretrained(smollm2)(TEXT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    with torch.no_grad():
        want = model(input_ids=ids, labels=ids, use_cache=False)
    assert want.loss.item() < 3.0, "the weights do not speak English"
    for loss, tokens in run_ranks(3, _reads_and_writes, str(smollm2), str(tmp_path / "out"), ids, timeout=200):
        assert loss == pytest.approx(want.loss.item(), abs=1e-4)
        assert torch.equal(tokens, want.logits[0].argmax(-1))
    assert differing(contents(tmp_path / "out"), contents(smollm2)) == []

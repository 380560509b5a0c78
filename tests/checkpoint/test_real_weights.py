"""SmolLM2-135M through load and save on dp_shard 4."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dtensor_5d.checkpoint.pretrained import load_pretrained, save_pretrained
from dtensor_5d.checkpoint.template import named_tensors
from tests.checkpoint.layouts import differing, on_meta, sharded
from tests.harness import run_ranks
from tests.pretrained_model import TEXT, smollm2  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.pretrained, pytest.mark.timeout(300)]


def reads_and_writes(rank, folder, out, ids):
    model = sharded(on_meta(AutoConfig.from_pretrained(folder)), init_device_mesh("cpu", (4,)))
    start = time.perf_counter()
    load_pretrained(model, folder, device="cpu")
    loaded = time.perf_counter()
    with torch.no_grad():
        result = model(input_ids=ids, labels=ids, use_cache=False)
    saving = time.perf_counter()
    save_pretrained(model, out, config=model.config, source=folder)
    seconds = (loaded - start, time.perf_counter() - saving)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result.loss.item(), result.logits[0].argmax(-1), seconds, peak


def test_smollm2_on_four_ranks(smollm2, tmp_path):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    with torch.no_grad():
        want = model(input_ids=ids, labels=ids, use_cache=False)
    assert want.loss.item() < 3.0, "the weights do not speak English"
    results = run_ranks(4, reads_and_writes, str(smollm2), str(tmp_path / "out"), ids, timeout=200)
    for loss, tokens, seconds, peak in results:
        assert loss == pytest.approx(want.loss.item(), abs=1e-4)
        assert torch.equal(tokens, want.logits[0].argmax(-1))
        print(f"load {seconds[0]:.2f} s, save {seconds[1]:.2f} s, peak resident {peak / 2**30:.2f} GiB")
    assert differing(contents(tmp_path / "out"), contents(smollm2)) == []
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert differing(named_tensors(again), named_tensors(model)) == []
    assert tokenizer(TEXT).input_ids == AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT).input_ids


def contents(folder):
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            found.update({key: handle.get_tensor(key) for key in handle.keys()})  # noqa: SIM118
    return found

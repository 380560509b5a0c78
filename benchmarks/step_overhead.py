"""What the package costs on top of a plain Hugging Face step.

    python benchmarks/step_overhead.py [--json PATH]

Two comparisons, each as the ratio of medians over interleaved runs on the same machine, one thread a process:
  world 1   `Run.step` against forward, loss and backward of the same transformers model (the limit is 1)
  dp_shard 2   `Run.step` against transformers' own `DistributedConfig(fsdp_size=2)`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, LlamaConfig

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for

SIZES = {  # name: (hidden, layers, rows, tokens a row, repeats)
    "80 ms step": (128, 4, 2, 128, 60),
    "2 s step": (512, 8, 2, 512, 9),
}


def llama(hidden: int, layers: int):
    torch.manual_seed(0)
    heads = hidden // 64
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=8192, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train()


def batch(rank: int, rows: int, length: int):
    ids = torch.randint(0, 8192, (rows, length), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids.clone()}


def interleaved(steps: dict, repeats: int, barrier=lambda: None) -> dict[str, float]:
    """Median seconds of each step; the order turns round in every round."""
    times = {name: [] for name in steps}
    for step in steps.values():
        step(), step()
    for turn in range(repeats):
        names = list(steps) if turn % 2 else list(reversed(steps))
        for name in names:
            barrier()
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def training(model, forward_backward):
    optim = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step():
        forward_backward()
        optim.step()
        optim.zero_grad()

    return step


def world_one(name: str) -> dict:
    hidden, layers, rows, length, repeats = SIZES[name]
    plain, ours = llama(hidden, layers), llama(hidden, layers)
    run = parallelize(ours, plan_for(ours, Degrees()), build_mesh(Degrees(), "cpu"))
    data = batch(0, rows, length)
    steps = {
        "ours": training(ours, lambda: run.step(data)),
        "transformers": training(plain, lambda: plain(**data).loss.backward()),
    }
    return interleaved(steps, repeats)


def world_two(rank: int, port: int, name: str, folder: str, queue) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    from transformers.distributed import DistributedConfig

    hidden, layers, rows, length, repeats = SIZES[name]
    dist.init_process_group("gloo")
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=2)
    ).train()
    ours = llama(hidden, layers)
    degrees = Degrees(dp_shard=2)
    run = parallelize(ours, plan_for(ours, degrees), build_mesh(degrees, "cpu"))
    data = batch(rank, rows, length)
    steps = {
        "ours": training(ours, lambda: run.step(data)),
        "transformers": training(theirs, lambda: theirs(**data).loss.backward()),
    }
    times = interleaved(steps, repeats, dist.barrier)
    if rank == 0:
        queue.put(times)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in SIZES:
        found.append({"world": "1", "step": name, **world_one(name)})
    for name, (hidden, layers, *_) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            llama(hidden, layers).save_pretrained(folder)
            queue = mp.get_context("spawn").SimpleQueue()
            port = 20000 + os.getpid() % 20000
            mp.spawn(world_two, args=(port, name, folder, queue), nprocs=2)
            found.append({"world": "dp_shard 2", "step": name, **queue.get()})
    print(f"{'world':12}{'step':14}{'ours ms':>10}{'transformers ms':>18}{'ratio':>8}")
    for row in found:
        row["ratio"] = row["ours"] / row["transformers"]
        ours, theirs = row["ours"] * 1e3, row["transformers"] * 1e3
        print(f"{row['world']:12}{row['step']:14}{ours:10.1f}{theirs:18.1f}{row['ratio']:8.3f}")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=2))


if __name__ == "__main__":
    main()

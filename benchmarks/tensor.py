"""dp_shard 2 x tp 2 against transformers' own `DistributedConfig(fsdp_size=2, tp_size=2)`, the same model and rows.

    python benchmarks/tensor.py [--json PATH] [--repeats N]

Medians over interleaved runs, one thread a process. Printed beside: sequence parallelism on (over gloo its all-gather
and reduce-scatter cost more than one all-reduce), the limit (the same products without any exchange: one rank with its
share of the weights), and the peak memory of the logits with the loss in chunks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import weakref
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from dtensor_5d import Degrees, build_mesh, parallelize, plan_for

ROWS, LENGTH, VOCABULARY = 2, 512, 8192


def llama(share: int = 1):
    """share: with 1 / share of the heads, channels and vocabulary, as one rank has them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408 // share, num_hidden_layers=8, num_attention_heads=8 // share,
        num_key_value_heads=2 // share, head_dim=64, vocab_size=VOCABULARY // share, tie_word_embeddings=False,
        use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train()


def batch(rank: int, vocabulary: int = VOCABULARY):
    ids = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids.clone()}


def training(model, forward_backward):
    optim = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step():
        forward_backward()
        optim.step()
        optim.zero_grad()

    return step


def interleaved(steps: dict, repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step(), step()
    for turn in range(repeats):
        for name in steps if turn % 2 else reversed(steps):
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    return times


class Peak(TorchDispatchMode):
    """The most bytes alive at once in tensors of this width (last dim)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes = 0
        self._width = width
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:
        out = func(*args, **(kwargs or {}))
        held = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if type(t) is torch.Tensor}
        for t in tree_leaves(out):
            if type(t) is torch.Tensor and t.dim() >= 2 and t.shape[-1] == self._width and t.numel():
                storage = t.untyped_storage()
                if storage._cdata not in held and storage._cdata not in self._alive:
                    self._alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        self.bytes = max(self.bytes, sum(self._alive.values()))
        return out


def worker(rank: int, port: int, folder: str, repeats: int, queue) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "4"}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=2, tp_size=2)
    ).train()
    degrees = Degrees(dp_shard=2, tp=2)
    mesh = build_mesh(degrees, "cpu")
    data = batch(mesh.data_rank)
    steps = {"transformers": training(theirs, lambda: theirs(**data).loss.backward())}
    for name, options in {
        "ours": dict(sequence_parallel=False),
        "ours, zero 2": dict(sequence_parallel=False, zero=2),
        "ours, sequence parallel": dict(sequence_parallel=True),
    }.items():
        model = llama()
        run = parallelize(model, plan_for(model, degrees, **options), mesh)
        steps[name] = training(run, lambda run=run: run.step(data))
    alone, share = llama(share=2), batch(rank, VOCABULARY // 2)
    steps["limit: no exchange"] = training(alone, lambda: alone(**share).loss.backward())
    times = interleaved(steps, repeats)
    with Peak(VOCABULARY // 2) as peak:
        steps["ours"]()
    if rank == 0:
        queue.put((times, peak.bytes))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(folder)
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(worker, args=(20000 + os.getpid() % 20000, folder, options.repeats, queue), nprocs=4)
        times, peak = queue.get()
    base = times["transformers"]
    rows = [
        {
            "what": name,
            "ms": 1e3 * statistics.median(taken),
            "ratio": statistics.median(taken) / statistics.median(base),
            "paired": statistics.median(a / b for a, b in zip(taken, base)),
        }
        for name, taken in times.items()
    ]
    print(f"{'dp_shard 2 x tp 2':28}{'ms':>9}{'ratio':>8}{'paired':>8}")
    for row in rows:
        print(f"{row['what']:28}{row['ms']:9.1f}{row['ratio']:8.3f}{row['paired']:8.3f}")
    whole = ROWS * LENGTH * VOCABULARY * 4
    print(f"\nlogits of {ROWS * LENGTH} tokens: {whole / 2**20:.0f} MiB; most that a rank holds of logits and what has "
          f"their width: {peak / 2**20:.0f} MiB")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows, "logits_bytes": peak}, indent=2))


if __name__ == "__main__":
    main()

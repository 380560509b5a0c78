"""One DeepSeek-V3-like layer over 2 ranks, forward and backward: shared experts while tokens travel, and after them.

    python benchmarks/shared_overlap.py [--json PATH] [--repeats 15] [--tokens 4096]

E 64, top-8, M 512, I 192, one shared expert of `--shared` times I, fp32, one thread a process, gloo. "limit": the layer
without its shared experts, which is what a travel that hides them whole would leave. Ratios are medians over pairs of
interleaved runs. On two cores the two processes share them with gloo's threads, so little can be hidden there.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from dtensor_5d.expert.style import ExpertParallel

E, K, M, INNER, T = 64, 8, 512, 192, 4096


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=x.dtype)


def block(shared: int) -> DeepseekV3MoE:
    config = DeepseekV3Config(
        hidden_size=M, moe_intermediate_size=INNER, n_routed_experts=E, num_experts_per_tok=K, n_shared_experts=shared,
        n_group=8, topk_group=4,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    made = DeepseekV3MoE(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.02)
    return made


def trial(made, x, grad):
    parameters = list(made.parameters())

    def run():
        for p in parameters:
            p.grad = None
        h = x.clone().requires_grad_()
        out = made(h.unsqueeze(0))
        out.backward(grad.unsqueeze(0))
        return out.detach(), h.grad

    return run


def work(rank: int, port: int, tokens: int, shared: int, repeats: int, queue) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    full = block(shared)
    g = torch.Generator().manual_seed(10 + rank)
    x, grad = torch.randn(tokens, M, generator=g), torch.randn(tokens, M, generator=g)
    found = []
    for transport in ("direct", "all_to_all"):
        runs = {}
        for name, overlap in (("while", "shared_experts"), ("after", None), ("limit", None)):
            made = copy.deepcopy(full)
            if name == "limit":
                made.shared_experts = Nothing()
            style = ExpertParallel(transport=transport, overlap=overlap)
            parallelize_module(made if overlap else made.experts, mesh, style)
            runs[name] = trial(made, x, grad)
        for a, b in zip(runs["while"](), runs["after"]()):
            assert (a - b).abs().max() < 1e-4 * b.abs().max(), "the results differ"
        runs["limit"]()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(repeats):
            for name in list(runs) if turn % 2 else list(reversed(runs)):
                dist.barrier()
                start = time.perf_counter()
                runs[name]()
                dist.barrier()
                times[name].append(time.perf_counter() - start)
        row = {"transport": transport} | {f"{name}_ms": 1e3 * statistics.median(t) for name, t in times.items()}
        for name in ("while", "limit"):
            row[f"{name}/after"] = statistics.median(a / b for a, b in zip(times[name], times["after"]))
        found.append(row)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=T, help="tokens a rank")
    parser.add_argument("--shared", type=int, default=1, help="size of the shared expert, in routed ones")
    options = parser.parse_args()
    queue = mp.get_context("spawn").SimpleQueue()
    port = 20000 + os.getpid() % 20000
    mp.spawn(work, args=(port, options.tokens, options.shared, options.repeats, queue), nprocs=2)
    found = queue.get()
    print(f"{'transport':14}{'while ms':>10}{'after ms':>10}{'limit ms':>10}{'while / after':>15}{'limit / after':>15}")
    for row in found:
        print(f"{row['transport']:14}", *(f"{row[name + '_ms']:9.1f}" for name in ("while", "after", "limit")), end="")
        print(f"{row['while/after']:15.3f}{row['limit/after']:15.3f}")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=2))


if __name__ == "__main__":
    main()

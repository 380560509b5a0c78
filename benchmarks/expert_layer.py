"""One mixture-of-experts layer over 2 ranks, forward and backward: ours, transformers' all-to-all, and the limit.

    python benchmarks/expert_layer.py [--json PATH] [--repeats 9] [--tokens 4096]

The layer is Qwen3-MoE's (E 64, top-8, M 512, I 192, 4096 tokens a rank, fp32), one thread a process, gloo. The limit is
the grouped products and the gate on rows that are already there and sorted, as many as this layer gives a rank: no
router, no exchange. "skewed": one rank's experts get 4 times the tokens of the other's. Ratios are medians over pairs
of interleaved runs. The bytes that a rank sends are counted and compared with the closed form.
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
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import Qwen3MoeConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from dtensor_5d.expert.style import ExpertParallel

E, K, M, INNER, T = 64, 8, 512, 192, 4096
PLAN = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm", "experts": "ep_dispatch_experts"}


def block() -> Qwen3MoeSparseMoeBlock:
    config = Qwen3MoeConfig(
        hidden_size=M, moe_intermediate_size=INNER, num_experts=E, num_experts_per_tok=K, norm_topk_prob=True
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    made = Qwen3MoeSparseMoeBlock(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return made


def skew(made: Qwen3MoeSparseMoeBlock, x: torch.Tensor, ranks: int, times: float) -> torch.Tensor:
    """x moved along a direction that the first rank's experts like, until they get `times` the others' load."""
    direction = torch.randn(M, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        made.gate.weight[: E // ranks] += 0.02 * direction / direction.norm()
        made.gate.weight[E // ranks :] -= 0.02 * direction / direction.norm()
    low, high = 0.0, 200.0
    for _ in range(30):
        middle = (low + high) / 2
        index = made.gate(x + middle * direction / direction.norm())[2]
        share = (index < E // ranks).float().mean().item()
        low, high = (middle, high) if share < times / (times + 1) else (low, middle)
    return x + low * direction / direction.norm()


def trial(made, x, grad):
    """Forward and backward; the gradients of everything."""
    parameters = list(made.parameters())

    def run():
        for p in parameters:
            p.grad = None
        h = x.clone().requires_grad_()
        out = made(h.unsqueeze(0))
        out.backward(grad.unsqueeze(0))
        return out, h.grad

    return run


def limit(made, rows: int, ends: torch.Tensor):
    """The experts alone: rows already there, sorted."""
    local = made.experts.gate_up_proj.detach()[: E // 2].clone().requires_grad_()
    down = made.experts.down_proj.detach()[: E // 2].clone().requires_grad_()
    x, g = torch.randn(rows, M).requires_grad_(), torch.randn(rows, M)

    def run():
        x.grad = local.grad = down.grad = None
        gate, up = F.grouped_mm(x, local.transpose(1, 2), offs=ends).chunk(2, -1)
        F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends).backward(g)

    return run


def counted(run, rank: int) -> int:
    """Bytes of rows that leave this rank in one run."""
    moved = [0]
    real_all, real_batch = dist.all_to_all_single, dist.batch_isend_irecv

    def count_all(out, rows, sizes_out, sizes_in, group, async_op):
        moved[0] += (sum(sizes_in) - sizes_in[rank]) * rows[0].numel() * rows.element_size()
        return real_all(out, rows, sizes_out, sizes_in, group=group, async_op=async_op)

    def count_batch(ops):
        moved[0] += sum(o.tensor.numel() * o.tensor.element_size() for o in ops if o.op is dist.isend)
        return real_batch(ops)

    dist.all_to_all_single, dist.batch_isend_irecv = count_all, count_batch
    try:
        run()
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = real_all, real_batch
    return moved[0]


def work(rank: int, port: int, tokens: int, repeats: int, queue) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    found = []
    for load in ("balanced", "skewed"):
        full = block()
        g = torch.Generator().manual_seed(10 + rank)
        x, grad = torch.randn(tokens, M, generator=g), torch.randn(tokens, M, generator=g)
        if load == "skewed":
            x = skew(full, x, 2, 4.0)
        index = full.gate(x)[2]
        counts = torch.bincount(index.flatten(), minlength=E)
        sent = int(counts.view(2, -1).sum(1)[1 - rank])
        everyone = counts.clone()
        dist.all_reduce(everyone)
        here = everyone.view(2, -1)[rank]
        runs = {"transformers": trial(apply_expert_parallelism(
            copy.deepcopy(full), mesh["ep"], mesh["tp"], PLAN, ep_implementation="all_to_all"), x, grad)}  # fmt: skip
        for name in ("auto", "all_to_all", "direct"):
            ours = parallelize_module(copy.deepcopy(full), mesh["ep"], {"experts": ExpertParallel(transport=name)})
            runs[name] = trial(ours, x, grad)
        runs["limit"] = limit(full, int(here.sum()), here.cumsum(0).to(torch.int32))
        want = runs["transformers"]()
        for name in ("auto", "all_to_all", "direct"):
            for a, b in zip(runs[name](), want):
                assert (a - b).abs().max() < 1e-4 * b.abs().max(), f"{name} differs from transformers"
        received = int(here.sum()) - int(counts.view(2, -1).sum(1)[rank])
        closed = 2 * (sent + received) * M * 4
        for name in ("all_to_all", "direct"):
            assert counted(runs[name], rank) == closed, "bytes sent differ from the closed form"
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(repeats):
            for name in list(runs) if turn % 2 else list(reversed(runs)):
                dist.barrier()
                start = time.perf_counter()
                runs[name]()
                dist.barrier()
                times[name].append(time.perf_counter() - start)
        row = {"load": load, "bytes_sent": closed}
        row |= {f"{name}_ms": 1e3 * statistics.median(t) for name, t in times.items()}
        for name in ("auto", "all_to_all", "direct"):
            row[f"{name}/transformers"] = statistics.median(a / b for a, b in zip(times[name], times["transformers"]))
            row[f"limit/{name}"] = statistics.median(a / b for a, b in zip(times["limit"], times[name]))
        found.append(row)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=T, help="tokens a rank (small: where blocks are small)")
    options = parser.parse_args()
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, args=(20000 + os.getpid() % 20000, options.tokens, options.repeats, queue), nprocs=2)
    found = queue.get()
    print(f"{'load':10}{'way':14}{'ms':>9}{'/ transformers':>16}{'limit / way':>13}")
    for row in found:
        for name in ("transformers", "all_to_all", "direct", "auto", "limit"):
            print(f"{row['load']:10}{name:14}{row[name + '_ms']:9.1f}", end="")
            ratios = (row.get(f"{name}/transformers"), row.get(f"limit/{name}"))
            print("".join(f"{r:{w}.3f}" for r, w in zip(ratios, (16, 13)) if r is not None))
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=2))


if __name__ == "__main__":
    main()

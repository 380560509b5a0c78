"""Ring attention on the CPU: against its limit, balanced against not, all strategies, and what memory it takes.

    python benchmarks/ring_attention.py [--json PATH] [--lengths 4096 8192] [--part speed] [--device cuda]

Causal, forward + backward, GQA 8:2, head size 64, fp32, cp 2, one thread a rank; S is the whole sequence. Every
figure is the ratio of medians over interleaved runs; a run is as long as its slower rank. Ratios are given twice: of
wall time, and of the CPU time of the slower rank, which does not see who else uses the machine (nor waiting).
  (a) limit   zig-zag ring against the same block calls in both processes, without exchange and without any sum
  (b) order   contiguous against zig-zag: the ring in both
  (c) ways    all strategies, as time of one step
  (d) memory  peak of a fresh process per S: what the step adds to inputs, per 1024 local tokens
With --device cuda (needs a GPU): the block calls of one rank of a simulated ring of 8, against one flash call over the
whole sequence / 8: what is lost by cutting a sequence into blocks. It runs on the CPU as well (--part simulate).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dtensor_5d.context import STRATEGIES, Mask, Scope, attend
from dtensor_5d.context.block import Block, block_for
from dtensor_5d.context.mask import Band
from dtensor_5d.context.plan import TilePlan, plan_tiles
from dtensor_5d.order import make_order

HEADS, KV_HEADS, SIZE, CP = 8, 2, 64, 2
REPEATS = {4096: 15, 8192: 9, 16384: 5, 32768: 3}


def inputs(length: int, device: str = "cpu", dtype: torch.dtype = torch.float32):
    shapes = [(HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, SIZE), (HEADS, SIZE)]
    torch.manual_seed(0)
    return [torch.randn(1, h, length, d, device=device, dtype=dtype) for h, d in shapes]


def step_of(scope: Scope, length: int):
    q, k, v, grad = inputs(length // CP)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        out = attend(*leaves, scope=scope)
        torch.autograd.grad(out, leaves, grad)

    return step


def block_calls(block: Block, plan: TilePlan, q, k, v, grad) -> None:
    """The block calls of a plan with one block as every owner's: no exchange, no sums."""
    for tiles in plan.tiles:
        for tile in tiles:
            out, lse = block.forward(q[:, :, tile.q], k[:, :, tile.k], v[:, :, tile.k], tile.band)
            block.backward(grad[:, :, tile.q], q[:, :, tile.q], k[:, :, tile.k], v[:, :, tile.k], out, lse, tile.band)


def limit_of(length: int, kind: str = "zigzag"):
    data = inputs(length // CP)
    block = block_for(data[0], data[2], SIZE**-0.5)
    order = make_order(kind, length, CP)
    plan = plan_tiles([order], [[r] for r in range(CP)], dist.get_rank(), Mask(), 1)
    return lambda: block_calls(block, plan, *data)


def interleaved(steps: dict, repeats: int) -> dict[str, list[float]]:
    """[wall seconds, CPU seconds] of the slower rank, medians per step; the order turns round in every round."""
    times: dict[str, list[list[float]]] = {name: [] for name in steps}
    for turn in range(-1, repeats):  # the first round warms up
        for name in list(steps) if turn % 2 else list(reversed(steps)):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if turn >= 0:
                times[name].append(spent.tolist())
    return {name: [statistics.median(x) for x in zip(*t)] for name, t in times.items()}


def start(rank: int, port: int) -> dist.ProcessGroup:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=CP)
    return dist.group.WORLD


def speed(rank: int, port: int, length: int, repeats: int, queue) -> None:
    group = start(rank, port)
    scopes = {name: Scope(group, (make_order("zigzag", length, CP),), strategy=name) for name in STRATEGIES}
    steps = {name: step_of(scope, length) for name, scope in scopes.items()}
    steps["contiguous"] = step_of(Scope(group, (make_order("none", length, CP),)), length)
    steps["limit"] = limit_of(length)
    found = interleaved(steps, repeats)
    if rank == 0:
        queue.put(found)
    dist.destroy_process_group()


def memory(rank: int, port: int, length: int, strategy: str, queue) -> None:
    group = start(rank, port)
    warm = step_of(Scope(group, (make_order("zigzag", 512, CP),), strategy=strategy), 512)
    warm()
    step = step_of(Scope(group, (make_order("zigzag", length, CP),), strategy=strategy), length)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if rank == 0:
        queue.put(used / 1024)
    dist.destroy_process_group()


def on_ranks(work, *args):
    queue = mp.get_context("spawn").SimpleQueue()
    port = 20000 + (os.getpid() * 7 + time.time_ns() // 1000) % 20000
    mp.spawn(work, args=(port, *args, queue), nprocs=CP)
    return queue.get()


def simulated(device: str, length: int, ranks: int = 8) -> dict[str, float]:
    """Milliseconds per rank: the block calls of a ring of `ranks`, and one call over all, shared out."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    local, whole = inputs(length // ranks, device, dtype), inputs(length, device, dtype)
    block = block_for(local[0], local[2], SIZE**-0.5)
    plan = plan_tiles([make_order("zigzag", length, ranks)], [[r] for r in range(ranks)], ranks // 2, Mask(), 1)

    def one_call() -> None:
        q, k, v, grad = whole
        out, lse = block.forward(q, k, v, Band(None, 0))
        block.backward(grad, q, k, v, out, lse, Band(None, 0))

    def seconds(work) -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    times: dict[str, list[float]] = {"blocks": [], "one call": []}
    for turn in range(6):
        times["blocks"].append(seconds(lambda: block_calls(block, plan, *local)))
        times["one call"].append(seconds(one_call) / ranks)
        if not turn:
            times = {name: [] for name in times}
    return {name: statistics.median(t) * 1e3 for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(REPEATS))
    parser.add_argument("--repeats", type=int, help="runs of each kind; by default fewer the longer they are")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--part", default="all", choices=["all", "speed", "memory", "simulate"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if options.device == "cuda":
        options.part = "simulate"
    if options.part == "simulate":
        print(f"{'S':>7}{'blocks ms':>12}{'one call / 8 ms':>18}{'ratio':>8}")
        for length in options.lengths:
            row = {"length": length, **simulated(options.device, length)}
            rows.append(row)
            ratio = row["one call"] / row["blocks"]
            print(f"{length:7}{row['blocks']:12.1f}{row['one call']:18.1f}{ratio:8.3f}", flush=True)
    if options.part in ("all", "speed"):
        names = [*STRATEGIES, "contiguous", "limit"]
        heads = [f"{name} s" for name in names] + [f"{a} {b}" for a in ("limit", "contiguous") for b in ("wall", "CPU")]
        print(f"{'S':>7}" + "".join(f"{head:>16}" for head in heads))
        for length in options.lengths:
            row = {"length": length, **on_ranks(speed, length, options.repeats or REPEATS.get(length, 3))}
            rows.append(row)
            ratios = [row[name][clock] / row["ring"][clock] for name in ("limit", "contiguous") for clock in (0, 1)]
            print(f"{length:7}" + "".join(f"{x:16.3f}" for x in [*(row[n][0] for n in names), *ratios]), flush=True)
    if options.part in ("all", "memory"):
        print("peak memory of a step per rank, MiB (per 1024 local tokens)")
        for length in options.lengths:
            row = {"length": length, "memory": {name: on_ranks(memory, length, name) for name in STRATEGIES}}
            rows.append(row)
            print(f"{length:7}  " + "   ".join(
                f"{name} {used:.1f} ({used * 1024 * CP / length:.2f})" for name, used in row["memory"].items()
            ), flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()

"""How near the pipeline runtime comes to its simulator, and what splitting the backward costs.

    python benchmarks/pipeline_bubble.py [--ranks 2 4 8] [--json PATH]

(a) stages that sleep (F = I = W = 20 ms) under the real runtime with 1 MB messages over gloo: measured bubble beside
    the simulated one, in percent of the longest rank;
(b) F, I and W of a transformer stage beside its forward and fused backward, and torch's own split;
(c) a llama on 2 ranks: ZB-H1 / 1F1B, measured and predicted from the measured costs.
Medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

COST = 0.02
MESSAGE = (1, 512, 512)  # 1 MB of fp32


class Sleeping:
    """A stage whose actions take their cost and compute nothing."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    def forward(self, micro, received):
        time.sleep(COST)
        return self.hidden

    def backward_input(self, micro, gradient):
        time.sleep(COST)
        return self.hidden

    def backward_weight(self, micro):
        time.sleep(COST)


def timed_stages(rank: int, ranks: int, store: str, out: str) -> None:
    import ctypes

    from dtensor_5d.pipeline.runtime import Runtime, Unsharded
    from dtensor_5d.pipeline.timeline import measured_timeline
    from dtensor_5d.pipeline.transport import Transport
    from dtensor_5d.schedule import Costs, build, lower, simulate

    ctypes.CDLL(None).prctl(29, 1000, 0, 0, 0)  # sleeps end within 1 us of their time (PR_SET_TIMERSLACK)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    hidden = torch.zeros(MESSAGE)
    found: dict[str, list[float]] = {}
    costs = Costs(COST, COST, COST)
    schedules = {name: build(name, ranks=ranks, microbatches=2 * ranks) for name in ("1f1b", "zb-h1", "zbv")}
    for _ in range(5):
        for name, schedule in schedules.items():
            runtime = Runtime(
                rank=rank, stages={s: Sleeping(hidden) for s in schedule.stages_of(rank)},
                transport=Transport(dist.group.WORLD, torch.device("cpu")), parameters=Unsharded(),
                shape=lambda _: MESSAGE, dtype=torch.float32, sends_gradient=[True] * schedule.stages,
            )  # fmt: skip
            lowered = lower(schedule, None, None)
            dist.barrier()
            runtime.run(lowered)
            timeline = measured_timeline(lowered, runtime.records, costs, dist.group.WORLD)
            found.setdefault(name, []).append(timeline.bubble_rate)
    if rank == 0:
        plain = {name: lower(schedule, None, None).compute_only() for name, schedule in schedules.items()}
        rows = {n: (statistics.median(rates), simulate(plain[n], costs).bubble_rate) for n, rates in found.items()}
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def bubbles(counts: list[int], folder: Path) -> list[dict]:
    print(f"{'(a) bubble, percent':24} {'measured':>9} {'simulated':>10} {'points':>7}")
    rows = []
    for ranks in counts:
        out = folder / f"bubbles{ranks}.json"
        mp.spawn(timed_stages, (ranks, str(folder / f"store{ranks}"), str(out)), nprocs=ranks)
        for name, (measured, simulated) in json.loads(out.read_text()).items():
            print(f"{f'{name} p{ranks} m{2 * ranks}':24} {measured:9.2%} {simulated:10.2%} "
                  f"{100 * (measured - simulated):7.2f}")  # fmt: skip
            rows.append({"case": f"{name} p{ranks}", "measured": measured, "simulated": simulated})
    return rows


def llama(layers: int, width: int = 512) -> nn.Module:
    torch.manual_seed(0)
    heads = width // 64
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=1408 * width // 512, head_dim=64,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def split_backward() -> list[dict]:
    """A middle stage of 2 layers, 512 tokens."""
    torch.set_num_threads(1)
    rows = []
    print(f"{'(b) transformer stage':24} {'fused ms':>9} {'split':>7} {'torch split':>12}")
    for policy in ("none", "block"):
        times = split_times(policy)
        base = times["fused"]
        print(f"{'recompute=' + policy:24} {base * 1e3:9.1f} {times['ours'] / base:7.3f} {times['torch'] / base:12.3f}")
        rows.append({"case": policy, "ours": times["ours"] / base, "torch": times["torch"] / base})
    return rows


def split_times(policy: str) -> dict[str, float]:
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    ids, hidden = torch.ones(1, 512, dtype=torch.long), torch.randn(1, 512, 512)
    model, view, _ = middle_stage(policy, ids, waits=False)
    _, _, stage = middle_stage(policy, ids, waits=True)

    def fused():
        received = hidden.clone().requires_grad_()
        view({"input_ids": ids}, received).backward(hidden)

    def ours():
        stage.forward(0, hidden)
        stage.backward_input(0, hidden)
        stage.backward_weight(0)

    def torchs():
        received = hidden.clone().requires_grad_()
        out = view({"input_ids": ids}, received)
        _, groups = stage_backward_input([out], [hidden], [received], model.parameters())
        stage_backward_weight(model.parameters(), groups)

    return interleaved({"fused": fused, "ours": ours, "torch": torchs})


def middle_stage(policy: str, ids: torch.Tensor, *, waits: bool):
    from dtensor_5d.adapters.decoder import find_decoder
    from dtensor_5d.ops import WeightGradients, make_deferrable
    from dtensor_5d.pipeline.split import Cut, keep_stages, view_of
    from dtensor_5d.pipeline.stage import Stage
    from dtensor_5d.recompute import recompute_layers

    model, cut = llama(4), Cut((1, 2, 1), (0, 1, 2))
    decoder = find_decoder(model)
    keep_stages(model, decoder, cut, 1)
    view = view_of(model, decoder, cut, 1)
    store = WeightGradients()
    if waits:
        make_deferrable(model, store)
    recompute_layers([model.model.layers[i] for i in (1, 2)], policy)
    view.refresh()
    forward = lambda micro, received: view({"input_ids": ids}, received)  # noqa: E731
    return model, view, Stage(1, forward, store, sends_gradient=True)


def interleaved(runs: dict[str, Callable[[], None]], repeats: int = 21) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn:
                found.setdefault(name, []).append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def real_ranks(rank: int, store: str, out: str) -> None:
    from dtensor_5d import Degrees, build_mesh, parallelize, plan_for
    from dtensor_5d.schedule import simulate

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = build_mesh(Degrees(pp=2), "cpu")
    runs, spans, foretold = {}, {}, {}
    for name in ("1f1b", "zb-h1"):
        model = llama(4)
        runs[name] = parallelize(model, plan_for(model, Degrees(pp=2), schedule=name, microbatches=4), mesh)
    ids = torch.randint(0, 256, (4, 256), generator=torch.Generator().manual_seed(0))
    for turn in range(8):
        for name, run in runs.items():
            run.step({"input_ids": ids, "labels": ids})
            timeline = run.timeline()
            if turn:
                spans.setdefault(name, []).append(timeline.makespan)
                foretold.setdefault(name, []).append(simulate(timeline.schedule, timeline.costs).makespan)
    if rank == 0:
        ratio = [statistics.median(t["zb-h1"]) / statistics.median(t["1f1b"]) for t in (spans, foretold)]
        Path(out).write_text(json.dumps(ratio))
    dist.destroy_process_group()


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found = {"bubbles": bubbles(args.ranks, folder), "split": split_backward()}
        mp.spawn(real_ranks, (str(folder / "store"), str(folder / "real.json")), nprocs=2)
        measured, foretold = json.loads((folder / "real.json").read_text())
    print(f"(c) llama on 2 ranks, ZB-H1 / 1F1B: measured {measured:.3f}, predicted {foretold:.3f}")
    if args.json:
        args.json.write_text(json.dumps({**found, "real": [measured, foretold]}, indent=1))


if __name__ == "__main__":
    main()

"""Trains a small Qwen3 over a pipeline and draws what its schedule did, beside what the simulator says of it.

    torchrun --nproc-per-node 2 recipes/pipeline.py
    torchrun --nproc-per-node 4 recipes/pipeline.py --schedule zb-h1 --dp-shard 2
    torchrun --nproc-per-node 4 recipes/pipeline.py --schedule 1f1b --pp 4 --microbatches 8

Writes OUT/timeline.svg (for a browser) and OUT/trace.json (for ui.perfetto.dev): the last window, measured and
simulated with the costs that were measured. Ranks that share cores slow each other down, and the measured bars show it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from dtensor_5d.loader import END, VOCABULARY, PackedLoader, read_documents, tokenize
from dtensor_5d.options import SCHEDULES
from dtensor_5d.report.svg import schedule_svg
from dtensor_5d.report.trace import chrome_trace
from dtensor_5d.schedule import simulate


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--schedule", default="zbv", choices=[name for name in SCHEDULES if name != "dualpipe"])
    add("--pp", type=int, default=2, help="ranks of the pipeline")
    add("--dp-shard", type=int, default=-1, help="ranks that share the parameters (default: all that are left)")
    add("--microbatches", type=int, default=8)
    add("--layers", type=int, default=8)
    add("--hidden", type=int, default=128, help="model size, a multiple of 64")
    add("--sequence", type=int, default=128, help="bytes in a sequence")
    add("--steps", type=int, default=20)
    add("--text", help="a file or a folder; default: the Python standard library")
    add("--out", default="out/pipeline", help="the folder to write (default %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    for chatty in ("torchao", "torch.utils._pytree"):  # on import: kernels that a CPU cannot load, deprecations
        logging.getLogger(chatty).setLevel(logging.ERROR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 32, num_key_value_heads=args.hidden // 64,
        head_dim=32, max_position_embeddings=max(1024, args.sequence), tie_word_embeddings=True,
        bos_token_id=END, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    degrees = Degrees(pp=args.pp, dp_shard=args.dp_shard)
    plan = plan_for(config, degrees, schedule=args.schedule, microbatches=args.microbatches)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    run = parallelize(model, plan, build_mesh(degrees, device))
    run.init_weights(seed=0)
    first = dist.get_rank() == 0
    if first:
        print(plan)
    batches = PackedLoader(
        tokenize(read_documents(args.text)), batch_size=2 * args.microbatches * run.data_size, seed=0,
        data_rank=run.data_rank, data_size=run.data_size, sequence_length=args.sequence,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(run.parameters(), lr=2e-3, weight_decay=0.1)
    for step, batch in enumerate(batches.steps(args.steps), 1):
        loss = run.step(batch)
        norm = run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first and (step % max(1, args.steps // 5) == 0 or step == args.steps):
            print(f"step {step}/{args.steps}  loss {loss.item():.3f}  norm {norm.item():.2f}")
    measured = run.timeline()
    assert measured is not None
    if first:
        simulated = simulate(measured.schedule, measured.costs)
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "timeline.svg").write_text(schedule_svg([measured, simulated]))
        (out / "trace.json").write_text(chrome_trace([measured, simulated], microseconds=1e6))
        for what, timeline in (("measured", measured), ("simulated", simulated)):
            print(f"{what}: {timeline.makespan * 1e3:.1f} ms a window, bubble {timeline.bubble_rate:.1%}")
        print(f"written: {out / 'timeline.svg'}, {out / 'trace.json'}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (PlanError, OSError) as error:
        sys.exit(f"pipeline.py: {error}")

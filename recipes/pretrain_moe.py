"""Trains a small Qwen3-MoE from scratch on text: experts on ranks of their own, tokens travel to them.

    torchrun --nproc-per-node 2 recipes/pretrain_moe.py
    torchrun --nproc-per-node 4 recipes/pretrain_moe.py --ep 4 --tp 2
    torchrun --nproc-per-node 4 recipes/pretrain_moe.py --ep 2 --dispatch all_gather --balance 0

What is left of the ranks are data ranks. The load of the experts is shown as bars, a line for each layer and a bar for
each expert: as high as its share of the tokens, full at twice an equal share. --balance is the weight of the auxiliary
loss that evens it out; with 0 watch what happens. Text, folder and token counts as in pretrain.py, whose helpers this
uses.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pretrain import generate, learning_rate, measured_peak, progress
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from dtensor_5d import Degrees, PlanError, build_mesh, parallelize, plan_for
from dtensor_5d.loader import (
    END,
    VOCABULARY,
    PackedLoader,
    read_documents,
    split_documents,
    tokenize,
    write_byte_tokenizer,
)

BARS = " ▁▂▃▄▅▆▇█"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", help="a file or a folder; default: the Python standard library")
    add("--out", default="out/pretrain_moe", help="the Hugging Face folder to write (default %(default)s)")
    add("--steps", type=int, default=200)
    add("--rows", type=int, default=16, help="sequences in a global batch")
    add("--sequence", type=int, default=128, help="bytes in a sequence")
    add("--hidden", type=int, default=128, help="model size, a multiple of 64")
    add("--layers", type=int, default=4)
    add("--experts", type=int, default=16)
    add("--choices", type=int, default=2, help="experts of a token")
    add("--balance", type=float, default=0.02, help="weight of the auxiliary loss (0: none)")
    add("--lr", type=float, default=1e-3)
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--seed", type=int, default=0)
    add("--dp-shard", type=int, default=-1, help="ranks that share the parameters (default: all that are left)")
    add("--tp", type=int, default=1, help="ranks over which attention is cut")
    add("--ep", type=int, default=2, help="ranks over which the experts are spread")
    add("--etp", type=int, default=1, help="ranks over which each expert is cut")
    add("--dispatch", default="all_to_all", choices=("all_to_all", "all_gather"))
    add("--zero", type=int, default=3, choices=(1, 2, 3))
    args = parser.parse_args()
    if args.hidden < 64 or args.hidden % 64:
        parser.error(f"--hidden {args.hidden}: must be a multiple of 64 (two heads of 32 for each key and value head)")
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    return args


def main() -> None:
    args = arguments()
    for chatty in ("torchao", "torch.utils._pytree"):  # on import: kernels that a CPU cannot load, deprecations
        logging.getLogger(chatty).setLevel(logging.ERROR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        moe_intermediate_size=args.hidden, num_experts=args.experts, num_experts_per_tok=args.choices,
        norm_topk_prob=True, output_router_logits=args.balance > 0, router_aux_loss_coef=args.balance,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 32, num_key_value_heads=args.hidden // 64,
        head_dim=32, max_position_embeddings=max(1024, args.sequence), bos_token_id=END, eos_token_id=END,
        pad_token_id=END,
    )  # fmt: skip
    degrees = Degrees(dp_shard=args.dp_shard, tp=args.tp, ep=args.ep, etp=args.etp)
    options: dict[str, Any] = {"zero": args.zero, "precision": "bf16" if device == "cuda" else None}
    if args.ep * args.etp > 1:
        options["dispatch"] = args.dispatch
    plan = plan_for(config, degrees, **options)
    mesh = build_mesh(degrees, device)
    console = Console(quiet=dist.get_rank() > 0)
    if dist.get_rank() == 0:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    console.print(str(plan))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    run = parallelize(model, plan, mesh)
    run.init_weights(seed=args.seed)

    train, held_out = map(tokenize, split_documents(read_documents(args.text), 0.02, seed=args.seed))
    share: dict[str, Any] = dict(data_rank=run.data_rank, data_size=run.data_size, sequence_length=args.sequence)
    batches = PackedLoader(train, batch_size=args.rows, seed=args.seed, **share)
    some = max(run.data_size, min(64, len(held_out.tokens) // args.sequence))
    unseen = PackedLoader(held_out, batch_size=some, seed=args.seed, **share)

    optimizer = torch.optim.AdamW(run.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))
    whole = sum(p.numel() for p in run.parameters())
    idle = sum(p.numel() for n, p in run.named_parameters() if ".experts." in n) * (1 - args.choices / args.experts)
    tokens = args.rows * args.sequence
    flops = 6 * (whole - idle) * tokens
    console.print(f"{whole:,} parameters, {whole - idle:,.0f} of them at work for a token")

    with progress(console, args.steps) as show:
        for step, batch in enumerate(batches.steps(args.steps), 1):
            loss = run.step(batch)
            norm = run.clip_grad_norm_(args.clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step == 1:
                peak = measured_peak(device)
            show(step, loss, norm, tokens, flops / peak)
            if step in (1, args.steps) or step % max(1, args.steps // 4) == 0:
                console.print(bars(run.expert_load()), markup=False, highlight=False)

    loss_held_out, count = run.evaluate(itertools.islice(unseen, 8))
    run.save_pretrained(args.out)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        write_byte_tokenizer(args.out)
        console.print(f"held out: {loss_held_out:.3f} nats per byte (over {count:,} bytes)")
        console.print(f"saved: {Path(args.out).resolve()}\nwhat it writes:\n")
        console.print(generate(args.out), markup=False, highlight=False)


def bars(load: dict[str, torch.Tensor]) -> str:
    """A line for each layer, a bar for each expert: full at twice an equal share."""
    lines = []
    for name, counts in load.items():
        share = counts.double() / counts.double().mean().clamp_min(1e-9)
        drawn = "".join(BARS[min(8, round(4 * s))] for s in share.tolist())
        lines.append(f"  layer {name.split('.layers.')[-1].partition('.')[0]:>2} |{drawn}| fullest {share.max():.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main()
    except (PlanError, OSError) as error:
        sys.exit(f"pretrain_moe.py: {error}")

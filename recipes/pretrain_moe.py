"""Trains a small Qwen3-MoE from scratch on text: experts on ranks of their own, tokens travel to them.

    torchrun --nproc-per-node 2 recipes/pretrain_moe.py
    torchrun --nproc-per-node 4 recipes/pretrain_moe.py --ep 4 --tp 2
    torchrun --nproc-per-node 4 recipes/pretrain_moe.py --ep 2 --dispatch all_gather --balance 0

What is left of the ranks are data ranks. The load of the experts is shown as bars, a line for each layer and a bar for
each expert: as high as its share of the tokens, full at twice an equal share. --balance is the weight of the auxiliary
loss that evens it out; with 0 watch what happens. Everything else is as in pretrain.py, which this calls.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pretrain import checked, parser_of, pretrain, sizes
from transformers import Qwen3MoeConfig

from dtensor_5d import Degrees, PlanError, Run

BARS = " ▁▂▃▄▅▆▇█"


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "out/pretrain_moe", steps=200, lr=1e-3)
    add = parser.add_argument
    add("--experts", type=int, default=16)
    add("--choices", type=int, default=2, help="experts of a token")
    add("--balance", type=float, default=0.02, help="weight of the auxiliary loss (0: none)")
    add("--tp", type=int, default=1, help="ranks over which attention is cut")
    add("--ep", type=int, default=2, help="ranks over which the experts are spread")
    add("--etp", type=int, default=1, help="ranks over which each expert is cut")
    add("--dispatch", default="all_to_all", choices=("all_to_all", "all_gather"))
    return checked(parser)


def main() -> None:
    args = arguments()
    config = Qwen3MoeConfig(
        **sizes(args), moe_intermediate_size=args.hidden, num_experts=args.experts, num_experts_per_tok=args.choices,
        norm_topk_prob=True, output_router_logits=args.balance > 0, router_aux_loss_coef=args.balance,
    )  # fmt: skip
    degrees = Degrees(dp_shard=args.dp_shard, tp=args.tp, ep=args.ep, etp=args.etp)
    options: dict[str, Any] = {"dispatch": args.dispatch} if args.ep * args.etp > 1 else {}
    pretrain(args, config, degrees, bars, **options)


def bars(run: Run) -> str:
    """A line for each layer, a bar for each expert: full at twice an equal share."""
    lines = []
    for name, counts in run.expert_load().items():
        share = counts.double() / counts.double().mean().clamp_min(1e-9)
        drawn = "".join(BARS[min(8, round(4 * s))] for s in share.tolist())
        lines.append(f"  layer {name.split('.layers.')[-1].partition('.')[0]:>2} |{drawn}| fullest {share.max():.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main()
    except (PlanError, OSError) as error:
        sys.exit(f"pretrain_moe.py: {error}")

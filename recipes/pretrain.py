"""Trains a small model from scratch on text and writes an ordinary Hugging Face folder.

    torchrun --nproc-per-node 8 recipes/pretrain.py        # Qwen3-MoE over pipeline, context, tensor and expert axis
    torchrun --nproc-per-node 4 recipes/pretrain.py        # Qwen3 over the data axis
    torchrun --nproc-per-node 4 recipes/pretrain.py --tp 2
    python recipes/pretrain.py --text my_texts/ --steps 2000 --hidden 256 --layers 6

On 8 ranks the axes are pp 2 x cp 2 x tp 2 with ep 2 folded in and the schedule ZBV, unless degrees are given; on other
numbers all ranks are the data axis. Without --text it reads the sources of the installed Python standard library.
Tokens are bytes, so losses are in nats per byte. On 4 ranks it takes about two minutes on two CPU cores; with a GPU for
each rank it uses them.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from dtensor_5d import Degrees, PlanError, Run, build_mesh, parallelize, plan_for
from dtensor_5d.loader import (
    END,
    VOCABULARY,
    PackedLoader,
    read_documents,
    split_documents,
    tokenize,
    write_byte_tokenizer,
)

if TYPE_CHECKING:  # they import torchao, which talks before `pretrain` can ask it not to
    from transformers import PreTrainedConfig, PreTrainedModel

AXES = ("--pp", "--dp-", "--cp", "--tp", "--ep", "--experts")


def parser_of(what: str | None, out: str, steps: int, lr: float) -> argparse.ArgumentParser:
    """What every pretraining takes. out, steps, lr: defaults."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", help="a file or a folder; default: the Python standard library")
    add("--out", default=out, help="the Hugging Face folder to write (default %(default)s)")
    add("--steps", type=int, default=steps, help="(default %(default)s)")
    add("--rows", type=int, default=16, help="sequences in a global batch")
    add("--sequence", type=int, default=128, help="bytes in a sequence")
    add("--hidden", type=int, default=128, help="model size, a multiple of 64")
    add("--layers", type=int, default=4)
    add("--lr", type=float, default=lr)
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--seed", type=int, default=0)
    add("--dp-shard", type=int, default=-1, help="ranks that share the parameters (default: all that are left)")
    add("--zero", type=int, default=3, choices=(1, 2, 3))
    add("--peak-tflops", type=float, help="peak of one rank, for the MFU (default: that of a measured matrix product)")
    return parser


def checked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.hidden < 64 or args.hidden % 64:
        parser.error(f"--hidden {args.hidden}: must be a multiple of 64 (two heads of 32 for each key and value head)")
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    return args


def arguments() -> argparse.Namespace:
    five = 2 if os.environ.get("WORLD_SIZE") == "8" and not any(a.startswith(AXES) for a in sys.argv) else 1
    parser = parser_of(__doc__, "out/pretrain", steps=200 if five == 2 else 300, lr=4e-3)
    add = parser.add_argument
    add("--dp-replicate", type=int, default=1, help="copies of such a group")
    add("--pp", type=int, default=five, help="ranks over which the layers are cut (default %(default)s)")
    add("--cp", type=int, default=five, help="ranks over which sequences are cut (default %(default)s)")
    add("--tp", type=int, default=five, help="ranks over which each layer is cut, tokens between blocks too")
    add("--ep", type=int, default=five, help="ranks over which experts are cut (default %(default)s)")
    add("--experts", type=int, default=None, help="experts of a layer, 0 for a dense model (default: 8 where ep > 1)")
    add("--schedule", default="zbv", help="of the pipeline (default %(default)s)")
    add("--microbatches", type=int, help="parts of a batch (default: 2 for each rank of the pipeline, else 1)")
    args = checked(parser)
    if args.experts is None:
        args.experts = 8 if args.ep > 1 else 0
    if args.microbatches is None:
        args.microbatches = 2 * args.pp if args.pp > 1 else 1
    return args


def main() -> None:
    args = arguments()
    degrees = Degrees(
        pp=args.pp, dp_replicate=args.dp_replicate, dp_shard=args.dp_shard, cp=args.cp, tp=args.tp, ep=args.ep
    )
    options: dict[str, Any] = {"schedule": args.schedule} if args.pp > 1 else {}
    pretrain(args, model_config(args), degrees, microbatches=args.microbatches, **options)


def model_config(args: argparse.Namespace) -> Qwen3Config | Qwen3MoeConfig:
    """Qwen3, or Qwen3-MoE with experts of half the size of its MLP, two for each token."""
    if not args.experts:
        return Qwen3Config(**sizes(args))
    return Qwen3MoeConfig(
        **sizes(args), num_experts=args.experts, num_experts_per_tok=2, moe_intermediate_size=3 * args.hidden // 2,
        norm_topk_prob=True,
    )  # fmt: skip


def sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Those of a Qwen3 over bytes, for its config."""
    return dict(
        vocab_size=VOCABULARY, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 32, num_key_value_heads=args.hidden // 64,
        head_dim=32, max_position_embeddings=max(1024, args.sequence), tie_word_embeddings=True,
        bos_token_id=END, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip


def pretrain(
    args: argparse.Namespace, config: PreTrainedConfig, degrees: Degrees, seen: Callable[[Run], str] | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Builds, trains, evaluates, saves, and lets the saved model write.

    seen: what to show of the run, on all ranks, after the first and the last step and three times in between.
    """
    for chatty in ("torchao", "torch.utils._pytree"):  # on import: kernels that a CPU cannot load, deprecations
        logging.getLogger(chatty).setLevel(logging.ERROR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        options["precision"] = "bf16"
    plan = plan_for(config, degrees, zero=args.zero, **options)
    mesh = build_mesh(degrees, device)
    console = Console(quiet=dist.get_rank() > 0)
    if dist.get_rank() == 0:  # better now than after the training
        Path(args.out).mkdir(parents=True, exist_ok=True)
    console.print(str(plan))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters, at_work = counted(model)
    flops = args.rows * args.sequence * flops_per_token(config, at_work, args.sequence)
    run = parallelize(model, plan, mesh)
    run.init_weights(seed=args.seed)

    train, held_out = map(tokenize, split_documents(read_documents(args.text), 0.02, seed=args.seed))
    share: dict[str, Any] = dict(data_rank=run.data_rank, data_size=run.data_size, sequence_length=args.sequence)
    batches = PackedLoader(train, batch_size=args.rows, seed=args.seed, **share)
    some = max(run.data_size, min(64, len(held_out.tokens) // args.sequence))
    unseen = PackedLoader(held_out, batch_size=some, seed=args.seed, **share)
    console.print(f"{parameters:,} parameters, {at_work:,.0f} of them at work for a token")
    console.print(f"{len(train.tokens):,} bytes to train on, {len(held_out.tokens):,} held out")

    optimizer = torch.optim.AdamW(run.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))
    peak = dist.get_world_size() * args.peak_tflops * 1e12 if args.peak_tflops else measured_peak(device)
    console.print(f"{flops / 1e9:.1f} GFLOP a step, peak of all ranks {peak / 1e12:.2f} TFLOP/s")

    with progress(console, args.steps) as show:
        for step, batch in enumerate(batches.steps(args.steps), 1):
            loss = run.step(batch)
            norm = run.clip_grad_norm_(args.clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            show(step, loss, norm, args.rows * args.sequence, flops / peak)
            if seen is not None and (step in (1, args.steps) or step % max(1, args.steps // 4) == 0):
                console.print(seen(run), markup=False, highlight=False)

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


def learning_rate(step: int, steps: int) -> float:
    """The factor of a step: up in 20 steps, then down along a cosine to a tenth."""
    return min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))


def counted(model: PreTrainedModel) -> tuple[int, float]:
    """Parameters, and those at work for a token: of the experts the chosen ones."""
    config = model.config
    chosen = config.num_experts_per_tok / config.num_experts if hasattr(config, "num_experts") else 1.0
    found = [(p.numel(), chosen if ".experts." in name else 1.0) for name, p in model.named_parameters()]
    return sum(n for n, _ in found), sum(n * share for n, share in found)


def flops_per_token(config: PreTrainedConfig, parameters: float, sequence: int) -> float:
    """Forward and backward: 6 for each parameter of a product (the tied head once) and causal attention."""
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * sequence / 2
    return 6 * parameters + attention


def measured_peak(device: str) -> float:
    """FLOP/s of all ranks together in a matrix product that all do at the same time."""
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = math.inf
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(8):
            c = a @ b
        c[0, 0].item()  # waits for the device
        dist.barrier()  # ranks may share cores: the slowest one counts
        best = min(best, (time.perf_counter() - start) / 8)
    return dist.get_world_size() * 2 * n**3 / best


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Any]:
    """A bar in a terminal, a line now and then elsewhere: loss, gradient norm, tokens per second, MFU."""
    columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
               TimeRemainingColumn()]  # fmt: skip
    every = max(1, steps // 20)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps)
        mark = [0, time.perf_counter()]

        def show(step: int, loss: torch.Tensor, norm: torch.Tensor, tokens: int, seconds_at_peak: float) -> None:
            if step % every and step != steps:
                bar.advance(task)
                return
            now = time.perf_counter()
            rate = (step - mark[0]) / (now - mark[1])
            mark[:] = step, now
            text = (f"loss {loss.item():.3f}  norm {norm.item():.2f}  {rate * tokens:,.0f} tokens/s  "
                    f"MFU {rate * seconds_at_peak:.1%}")  # fmt: skip
            bar.update(task, advance=1, description=text)
            if not console.is_terminal:
                console.print(f"step {step}/{steps}  {text}", highlight=False)

        yield show


def generate(folder: str) -> str:
    """What the saved model writes, loaded as any Hugging Face model."""
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    prompt = tokenizer("def ", return_tensors="pt")
    return tokenizer.decode(model.generate(**prompt, max_new_tokens=160, do_sample=True, temperature=0.7)[0])


if __name__ == "__main__":
    try:
        main()
    except (PlanError, OSError) as error:
        sys.exit(f"pretrain.py: {error}")
